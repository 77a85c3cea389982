"""Prompt rows equal the reference's, from the text on: tests/golden/requests/*.npz were captured at its talker."""

import numpy as np
import pytest
import torch

from engine.checkpoint import Checkpoint
from engine.errors import InvalidRequest
from engine.prompt import PromptBuilder
from tests.conftest import GOLDEN
from tests.golden.oracle.requests import CLIP_TRANSCRIPT, REQUESTS


@pytest.fixture(scope="module")
def builders():
    return {
        name: PromptBuilder(Checkpoint.open(GOLDEN / "checkpoints" / name))
        for name in ("base", "custom_voice", "voice_design")
    }


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.name)
def test_rows_equal_the_reference(builders, request_):
    golden = np.load(GOLDEN / "requests" / f"{request_.name}.npz")
    icl = request_.voice == "icl"
    rows = builders[request_.checkpoint].build(
        request_.text,
        language=request_.language,
        speaker=request_.speaker,
        instruct=request_.instruct,
        speaker_embedding=golden["speaker_embedding"] if request_.voice else None,
        reference_codes=golden["reference_codes"] if icl else None,
        reference_text=CLIP_TRANSCRIPT if icl else None,
        non_streaming_text=request_.non_streaming,
    )
    assert rows.prefill.shape == golden["prefill"].shape
    assert np.abs(rows.prefill.numpy() - golden["prefill"]).max() < 1e-5
    # The reference pads trailing text within a batch; past its end every row is the pad row.
    trailing, mine = golden["trailing"], rows.trailing.numpy()
    assert np.abs(rows.pad.numpy() - golden["pad"]).max() < 1e-5
    n = max(len(trailing), len(mine))
    fill = [np.concatenate([t, np.repeat(golden["pad"][None], n - len(t), 0)]) for t in (trailing, mine)]
    assert np.abs(fill[0] - fill[1]).max() < 1e-5


def test_default_layouts_are_the_references(builders):
    base, custom = builders["base"], builders["custom_voice"]
    embedding = np.zeros(base.hidden, np.float32)
    streaming = base.build("Yes.", speaker_embedding=embedding)
    assert len(streaming.prefill) == len(
        base.build("Yes.", speaker_embedding=embedding, non_streaming_text=False).prefill
    )
    plain = custom.build("Yes.", speaker="vivian")
    assert len(plain.prefill) == len(custom.build("Yes.", speaker="vivian", non_streaming_text=True).prefill)


@pytest.mark.parametrize(
    ("checkpoint", "options", "field"),
    [
        ("base", {}, "voice"),
        ("base", {"speaker_embedding": np.zeros(3)}, "voice"),
        ("base", {"speaker_embedding": 0, "reference_codes": np.zeros((4, 16), np.int64)}, "ref_text"),
        (
            "base",
            {"speaker_embedding": 0, "reference_codes": np.zeros((4, 8), np.int64), "reference_text": "x"},
            "voice",
        ),
        ("base", {"speaker": "vivian", "speaker_embedding": 0}, "speaker"),
        ("custom_voice", {}, "speaker"),
        ("custom_voice", {"speaker": "nobody"}, "speaker"),
        ("custom_voice", {"speaker": "vivian", "language": "klingon"}, "language"),
        ("custom_voice", {"speaker": "vivian", "speaker_embedding": 0}, "voice"),
        ("voice_design", {"speaker": "vivian"}, "speaker"),
    ],
)
def test_parts_that_do_not_fit_are_refused(builders, checkpoint, options, field):
    builder = builders[checkpoint]
    if isinstance(options.get("speaker_embedding"), int):
        options = options | {"speaker_embedding": np.zeros(builder.hidden, np.float32)}
    with pytest.raises(InvalidRequest) as error:
        builder.build("Yes.", **options)
    assert error.value.field == field


def test_languages_by_name_and_code(builders):
    builder = builders["custom_voice"]
    english = builder.talker["codec_language_id"]["english"]
    assert builder.resolve_language("English") == builder.resolve_language("en-US") == english
    assert builder.resolve_language(None) is None and builder.resolve_language("auto") is None


def test_tokens_are_counted_as_the_tokenizer_makes_them(builders):
    text, style = "Hello there, all of you.", "Speak slowly."
    builder = builders["custom_voice"]
    assert builder.count_tokens(text) == len(builder.tokenizer(text)) > 5
    assert builder.count_tokens(text, style) == builder.count_tokens(text) + len(builder.tokenizer(style))
    assert builders["base"].count_tokens(text, style) == builders["base"].count_tokens(text)  # no instruction is read


def test_what_a_voice_always_brings_is_made_once_and_shared(builders):
    builder, rng = builders["base"], np.random.default_rng(0)
    embedding = rng.normal(0, 1, builder.hidden).astype(np.float32)
    codes = rng.integers(0, builder.talker["code_predictor_config"]["vocab_size"], (40, builder.checkpoint.groups))
    voice = {"speaker_embedding": embedding, "reference_codes": codes, "reference_text": "What the clip says."}
    first, second = builder.build("Yes.", **voice), builder.build("No, not at all.", **voice)
    assert first.parts[0] is second.parts[0] and first.parts[1] is not second.parts[1]
    kept = first.prefill.clone()
    builder.build("A third one, of another length.", **voice)
    assert torch.equal(first.prefill, kept)  # nobody writes into what is shared
    other = builder.build("Yes.", **voice | {"speaker_embedding": embedding + 1})
    assert not torch.equal(other.prefill, first.prefill)


def test_rows_in_half_precision_are_the_same_rows_rounded():
    checkpoint = Checkpoint.open(GOLDEN / "checkpoints" / "custom_voice")
    whole, half = PromptBuilder(checkpoint), PromptBuilder(checkpoint, torch.bfloat16)
    for streaming in (True, False):
        options = {"speaker": "vivian", "non_streaming_text": not streaming}
        a, b = (builder.build("All of it, please.", **options) for builder in (whole, half))
        assert torch.equal(a.prefill.bfloat16(), b.prefill) and torch.equal(a.trailing.bfloat16(), b.trailing)
