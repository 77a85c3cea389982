"""Makes the checkpoints and golden files: `python -m tests.golden.oracle [KIND ...]`, in the oracle's environment."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import librosa
import numpy as np
import torch

from tests.golden.oracle import checkpoints
from tests.golden.oracle.reference import Qwen3TTSModel
from tests.golden.oracle.requests import CLIP_TRANSCRIPT, REQUESTS, Golden

GOLDEN = Path("tests/golden")
CLIP = Path("assets/voices/human_arctic.flac")
# Below this distance between best and second-best score, another order of summation could pick another code.
LEAST_MARGIN = 5e-5


class Recorder:
    """Keeps what goes into the talker, and how clear each greedy choice was."""

    def __init__(self, model) -> None:
        self.inputs: dict[str, torch.Tensor] = {}
        self.margins: list[float] = []
        talker, predictor = model.talker, model.talker.code_predictor
        talker_generate, predictor_generate = talker.generate, predictor.generate

        def record_talker(**kw):
            self.inputs = {k: kw[k].clone() for k in ("inputs_embeds", "trailing_text_hidden", "tts_pad_embed")}
            return self._watch(talker_generate(**kw, output_scores=True))

        def record_predictor(**kw):
            return self._watch(predictor_generate(**kw, output_scores=True))

        talker.generate, predictor.generate = record_talker, record_predictor

    def _watch(self, result):
        for scores in result.scores:
            best = scores[0].topk(2).values
            self.margins.append(float(best[0] - best[1]))
        return result


def codes_and_prompt(wrapper: Qwen3TTSModel, recorder: Recorder, golden: Golden, clip: tuple) -> dict[str, np.ndarray]:
    """Runs one request through the wrapper. Codes are taken before the wrapper decodes them."""
    made: dict[str, torch.Tensor] = {}
    generate = wrapper.model.generate

    def record(**kw):
        codes, hidden = generate(**kw)
        made["codes"], made["text_ids"] = codes[0], kw["input_ids"][0][0]
        return codes, hidden

    wrapper.model.generate = record
    common = {
        "text": golden.text,
        "language": golden.language,
        "non_streaming_mode": golden.non_streaming,
        "max_new_tokens": golden.frames + 1,  # the reference never completes the frame of its last code
        "do_sample": False,
        "subtalker_dosample": False,
        "repetition_penalty": golden.repetition_penalty,
    }
    recorder.margins.clear()
    voice = None
    try:
        if golden.checkpoint == "base":
            voice = wrapper.create_voice_clone_prompt(clip, CLIP_TRANSCRIPT, golden.voice == "x_vector")[0]
            wrapper.generate_voice_clone(**common, voice_clone_prompt=[voice])
        elif golden.checkpoint == "custom_voice":
            wrapper.generate_custom_voice(**common, speaker=golden.speaker, instruct=golden.instruct)
        else:
            wrapper.generate_voice_design(**common, instruct=golden.instruct)
    finally:
        wrapper.model.generate = generate
    arrays = {
        "prefill": recorder.inputs["inputs_embeds"][0],
        "trailing": recorder.inputs["trailing_text_hidden"][0],
        "pad": recorder.inputs["tts_pad_embed"].reshape(-1),
        "codes": made["codes"],
        "text_ids": made["text_ids"],
    }
    if voice is not None:
        arrays["speaker_embedding"] = voice.ref_spk_embedding
        if voice.ref_code is not None:
            arrays["reference_codes"] = voice.ref_code
    return {k: v.detach().cpu().numpy() for k, v in arrays.items()}


def write_requests(wrappers: dict[str, Qwen3TTSModel]) -> None:
    pcm, rate = librosa.load(CLIP, sr=None)
    recorders = {name: Recorder(wrapper.model) for name, wrapper in wrappers.items()}
    (GOLDEN / "requests").mkdir(exist_ok=True)
    listing = GOLDEN / "requests.json"
    known = json.loads(listing.read_text(encoding="utf-8"))["requests"] if listing.exists() else []
    described = {entry["name"]: entry for entry in known if entry["checkpoint"] not in wrappers}
    for golden in REQUESTS:
        if golden.checkpoint not in wrappers:
            continue
        recorder = recorders[golden.checkpoint]
        arrays = codes_and_prompt(wrappers[golden.checkpoint], recorder, golden, (pcm, rate))
        np.savez_compressed(GOLDEN / "requests" / f"{golden.name}.npz", **arrays)
        made, margin = len(arrays["codes"]), min(recorder.margins)
        finish = "length" if made == golden.frames else "stop"
        entry = asdict(golden) | {"made": made, "finish": finish, "margin": round(margin, 6)}
        entry |= {"prompt": len(arrays["prefill"]), "trailing": len(arrays["trailing"])}
        described[golden.name] = entry
        kinds = len(np.unique(arrays["codes"][:, 0]))
        print(
            f"{golden.name:28} prompt {entry['prompt']:4} trailing {entry['trailing']:4} frames {made:4} {finish:6} "
            f"codes {kinds:3} margin {margin:.1e}{'  TOO SMALL' if margin < LEAST_MARGIN else ''}"
        )
    ordered = [described[golden.name] for golden in REQUESTS if golden.name in described]
    text = json.dumps({"transcript": CLIP_TRANSCRIPT, "requests": ordered}, indent=1, ensure_ascii=False)
    listing.write_text(text + "\n", encoding="utf-8")


def write_clip(base: Qwen3TTSModel) -> None:
    """Speaker embedding and codes of a real clip, and of one that does not fill its last frame."""
    pcm, rate = librosa.load(CLIP, sr=None)
    arrays = {}
    for name, part in (("whole", pcm), ("ragged", pcm[5000 : 5000 + 1920 * 11 + 777])):
        item = base.create_voice_clone_prompt((part, rate), "-")[0]
        arrays[f"{name}_pcm"] = (part * 32768).astype(np.int16)
        arrays[f"{name}_embedding"] = item.ref_spk_embedding.numpy()
        arrays[f"{name}_codes"] = item.ref_code.numpy()
    np.savez_compressed(GOLDEN / "clip.npz", **arrays)
    print("clip", {k: v.shape for k, v in arrays.items()})


@torch.inference_mode()
def write_decoder(base: Qwen3TTSModel) -> None:
    """PCM of the reference's un-chunked forward: 64 frames, more than three attention windows of 20."""
    decoder = base.model.speech_tokenizer.model.decoder
    codes = torch.randint(
        0, checkpoints.CODES, (1, checkpoints.GROUPS, 64), generator=torch.Generator().manual_seed(11)
    )
    pcm = decoder(codes)
    np.savez_compressed(GOLDEN / "decoder.npz", codes=codes.numpy(), pcm=pcm.numpy())
    print("decoder", tuple(pcm.shape), "rms", float(pcm.square().mean().sqrt()), "peak", float(pcm.abs().max()))


def main() -> None:
    torch.set_num_threads(2)
    wanted = sys.argv[1:] or [kind.name for kind in checkpoints.KINDS]
    kinds = [kind for kind in checkpoints.KINDS if kind.name in wanted]
    wrappers = {}
    for kind in kinds:
        folder = GOLDEN / "checkpoints" / kind.name
        checkpoints.write(kind, folder, CLIP)
        wrappers[kind.name] = Qwen3TTSModel.from_pretrained(str(folder), dtype=torch.float32)
    if "base" in wrappers:
        write_clip(wrappers["base"])
        write_decoder(wrappers["base"])
    write_requests(wrappers)


if __name__ == "__main__":
    main()
