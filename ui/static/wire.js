// The stream of /chorus/speak: records of [type: 1 byte][length: uint32, little endian][payload].
// Type 74 ('J') is JSON, type 80 ('P') is float32 PCM, little endian. The other end is ui/wire.py.

export async function* records(body) {
  const reader = body.getReader();
  let rest = new Uint8Array(0);
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest = rest.length ? concat(rest, value) : value;
      for (;;) {
        if (rest.length < 5) break;
        const length = new DataView(rest.buffer, rest.byteOffset).getUint32(1, true);
        if (rest.length < 5 + length) break;
        const payload = rest.slice(5, 5 + length); // a copy, hence aligned
        if (rest[0] === 74) yield { json: JSON.parse(new TextDecoder().decode(payload)) };
        else yield { pcm: new Float32Array(payload.buffer) };
        rest = rest.subarray(5 + length);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function concat(a, b) {
  const both = new a.constructor(a.length + b.length);
  both.set(a);
  both.set(b, a.length);
  return both;
}

// Float32Array in [-1, 1] -> Blob of a finished 16-bit mono wav with true sizes. Rounds as engine/audio.py does.
export function wavBlob(pcm, rate) {
  const bytes = new ArrayBuffer(44 + 2 * pcm.length);
  const view = new DataView(bytes);
  const ascii = (at, text) => [...text].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  ascii(0, "RIFF"); view.setUint32(4, 36 + 2 * pcm.length, true); ascii(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, rate, true); view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  ascii(36, "data"); view.setUint32(40, 2 * pcm.length, true);
  for (let i = 0; i < pcm.length; i++) {
    view.setInt16(44 + 2 * i, Math.floor(Math.min(1, Math.max(-1, pcm[i])) * 32767 + 0.5), true);
  }
  return new Blob([bytes], { type: "audio/wav" });
}
