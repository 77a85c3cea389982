"""Work for a client who may leave: it ends with him, and with nothing else."""

from __future__ import annotations

import asyncio

import pytest

from engine.api.listening import Client, ClientGone


class Connection:
    """A `receive` that tells of the client's leaving when `leave` is called."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()
        self.waiting = 0

    def leave(self) -> None:
        self._gone.set()

    async def __call__(self) -> dict[str, str]:
        self.waiting += 1
        try:
            await self._gone.wait()
        finally:
            self.waiting -= 1
        return {"type": "http.disconnect"}


def test_the_result_and_one_watcher_for_several_pieces_of_work():
    async def main() -> None:
        connection = Connection()
        client = Client(connection)
        for number in range(3):
            assert await client.while_here(asyncio.sleep(0.001, number)) == number
            assert connection.waiting == 1
        client.close()
        await asyncio.sleep(0)
        assert connection.waiting == 0

    asyncio.run(main())


def test_leaving_cancels_the_work_and_no_more_begins():
    async def main() -> None:
        connection, ended = Connection(), []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        client = Client(connection)
        asyncio.get_running_loop().call_later(0.01, connection.leave)
        with pytest.raises(ClientGone):
            await client.while_here(work())
        assert ended == [True] and not asyncio.current_task().cancelling()
        with pytest.raises(ClientGone):
            await client.while_here(work())
        assert ended == [True]
        client.close()

    asyncio.run(main())


def test_a_server_that_stops_is_no_client_who_leaves():
    async def main() -> None:
        client = Client(Connection())
        task = asyncio.ensure_future(client.while_here(asyncio.sleep(60)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        client.close()

    asyncio.run(main())


def test_both_at_once_is_a_cancellation():
    async def main() -> None:
        connection = Connection()
        client = Client(connection)
        task = asyncio.ensure_future(client.while_here(asyncio.sleep(60)))
        await asyncio.sleep(0.01)
        connection.leave()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        client.close()

    asyncio.run(main())


def test_leaving_as_the_work_ends_cancels_nothing_later():
    """The watcher's word may be under way when the work is done: it must not hit what the task does next."""

    async def main() -> None:
        for ahead in range(4):  # turns of the loop between the leaving and the work's end
            connection = Connection()
            client = Client(connection)
            await asyncio.sleep(0)

            async def work(connection: Connection = connection, ahead: int = ahead) -> str:
                connection.leave()
                for _ in range(ahead):
                    await asyncio.sleep(0)
                return "done"

            try:
                assert await client.while_here(work()) == "done"
            except ClientGone:
                assert ahead > 0
            for _ in range(5):
                await asyncio.sleep(0)
            assert not asyncio.current_task().cancelling()
            client.close()

    asyncio.run(main())


def test_a_body_that_breaks_off_is_a_client_who_left():
    async def main() -> None:
        async def broken() -> dict[str, str]:
            raise RuntimeError("the connection is torn")

        client = Client(broken)
        with pytest.raises(ClientGone):
            await client.while_here(asyncio.sleep(60))
        client.close()

    asyncio.run(main())
