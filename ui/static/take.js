// One take: what was asked for, what came, and where in it each part of the text is.
export const FRAME = 1920; // samples
const RETRY_SEED_STEP = 1000; // a part that is said again takes another seed, the same one each time

// What a listing keeps of a take, and IndexedDB stores: {at, settings, seed, text, pcm, ending, texts, starts, done,
// failed, runs}. Of an older version's takes only the first six are there.
export class Take {
  constructor(settings) {
    this.at = Date.now();
    this.settings = settings;
    this.text = settings.text ?? "";
    this.seed = null;
    this.spoken = "";
    this.texts = []; // the parts, as spoken
    this.starts = []; // of part i: {at: first sample, seed}
    this.done = 0; // parts that are complete
    this.failed = null; // index of the part that was not
    this.runs = []; // requests: {first, text, seed, alone}
    this.retried = new Set();
    this.blocks = []; // Float32Array
    this.received = 0; // samples
    this.offset = 0; // samples of it that were there before this listening began
    this.clickedAt = performance.now();
    this.finished = this.over = this.kept = false;
  }

  // Go on with a kept take at a part; the parts before it stay.
  static resume(record, part) {
    const take = new Take(record.settings);
    Object.assign(take, { at: record.at, seed: record.seed, spoken: record.text, texts: record.texts, done: part,
                          starts: record.starts.slice(0, part), runs: [...record.runs] });
    const kept = record.starts[part]?.at ?? record.pcm.length;
    if (kept) take.add(record.pcm.slice(0, kept));
    take.offset = take.received;
    return take;
  }

  // One part of a kept take once more; `splice` puts it in its place.
  static again(record, part) {
    const take = new Take(record.settings);
    return Object.assign(take, { at: record.at, seed: record.seed, spoken: record.text, texts: record.texts, alone: part, old: record });
  }

  run(first, text, seed) {
    const run = { first, text, seed, alone: this.alone !== undefined, base: this.received };
    this.runs.push(run);
    return run;
  }

  started(run, event) {
    run.seed = event.seed;
    run.text = event.text;
    this.id = event.id;
    if (run.alone) return;
    this.texts = [...this.texts.slice(0, run.first), ...event.parts];
    if (run.first) return;
    this.seed = event.seed;
    this.spoken = event.text;
  }

  // Parts that begin in the next block: [[part of the run, frame of the run]].
  begins(run, starts) {
    for (const [part, frame] of starts) {
      if (run.alone) continue;
      this.done = run.first + part;
      this.starts[this.done] = { at: run.base + frame * FRAME, seed: run.seed + part };
    }
  }

  add(pcm) {
    this.blocks.push(pcm);
    this.received += pcm.length;
  }

  // The run of the part that failed and those after it; its sound so far is dropped.
  retry() {
    const part = this.failed;
    const seed = (this.starts[part]?.seed ?? this.seed + part) + RETRY_SEED_STEP;
    const whole = this.whole().slice(0, this.starts[part]?.at ?? this.received);
    this.retried.add(part);
    this.starts.length = part;
    this.failed = null;
    this.blocks = whole.length ? [whole] : [];
    this.received = whole.length;
    return { first: part, text: this.texts.slice(part).join(" "), seed };
  }

  whole() {
    const all = new Float32Array(this.received);
    this.blocks.reduce((at, block) => { all.set(block, at); return at + block.length; }, 0);
    return all;
  }

  toRecord(ending) {
    if (this.alone !== undefined) return this.#spliced();
    return { at: this.at, settings: this.settings, seed: this.seed, text: this.spoken, pcm: this.whole(), ending, texts: this.texts,
             starts: this.starts, done: this.done, failed: this.failed, runs: this.runs.map(plain) };
  }

  #spliced() {
    const { old, alone } = this;
    const from = old.starts[alone].at, to = old.starts[alone + 1]?.at ?? old.pcm.length;
    const fresh = this.whole();
    const pcm = new Float32Array(old.pcm.length - (to - from) + fresh.length);
    pcm.set(old.pcm.subarray(0, from));
    pcm.set(fresh, from);
    pcm.set(old.pcm.subarray(to), from + fresh.length);
    const starts = old.starts.map((start, i) => (i === alone ? { at: from, seed: this.runs[0].seed }
      : { ...start, at: start.at + (i > alone ? fresh.length - (to - from) : 0) }));
    return { ...old, pcm, starts, runs: [...old.runs, ...this.runs.map(plain)] };
  }

  // What the list of parts shows of part i.
  state(i) {
    if (this.alone === i && !this.finished) return "making"; // and if it fails, the take is as it was
    const { done, failed } = this.old ?? this;
    if (i === failed) return "failed";
    if (i < done) return "made";
    if (this.old || this.finished) return "missing";
    return i === done && this.starts.length > done ? "making" : "waiting";
  }

  // The part at a sample, or -1.
  partAt(sample) {
    if (this.alone !== undefined) return this.alone;
    return this.starts.findLastIndex((start) => start.at <= sample);
  }

  seedOf(i) {
    return (this.alone === i ? this.runs[0]?.seed : undefined) ?? (this.old ?? this).starts[i]?.seed;
  }
}

const plain = ({ first, text, seed, alone }) => ({ first, text, seed, alone });
