"""Records of the stream that `/chorus/speak` answers with: [type: 1 byte][length: uint32 LE][payload].

Type `J` is a JSON event, type `P` float32 little-endian PCM at 24 kHz. The reader is ui/static/wire.js.
Events: `start` (id, seed, text as spoken, its parts), `queue` (place in it: 1 is next, 0 is being spoken), `chunk`
(before each `P`: index, frames, and the parts that begin in it as [part, first frame of the stream]), `end` (how it
ended), `error` (typed, after the start).
"""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

MEDIA_TYPE = "application/octet-stream"


def event(name: str, **fields: Any) -> bytes:
    payload = json.dumps({"event": name, **fields}, separators=(",", ":")).encode()
    return struct.pack("<BI", ord("J"), len(payload)) + payload


def audio(pcm: np.ndarray) -> bytes:
    payload = np.ascontiguousarray(pcm, dtype="<f4").tobytes()
    return struct.pack("<BI", ord("P"), len(payload)) + payload


def read(data: bytes) -> list[dict[str, Any] | np.ndarray]:
    """All records of a whole answer, for tests and tools."""
    records: list[dict[str, Any] | np.ndarray] = []
    at = 0
    while at < len(data):
        kind, length = struct.unpack_from("<BI", data, at)
        payload = data[at + 5 : at + 5 + length]
        records.append(json.loads(payload) if kind == ord("J") else np.frombuffer(payload, "<f4"))
        at += 5 + length
    return records
