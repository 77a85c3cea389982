// Queue of PCM blocks that a sound card pulls from: gapless while it is fed, silent and counting while it is not.
// No browser API in here, so the AudioWorklet and the fall-back for insecure pages share it.

export class PcmQueue {
  constructor(rate) {
    this.rate = rate;
    this.reset(0);
  }

  // startBuffer: seconds held back before the first sample is let out; 0 plays at once.
  reset(startBuffer) {
    this.blocks = [];
    this.offset = 0; // samples of blocks[0] already pulled
    this.queued = 0; // samples waiting
    this.played = 0; // samples pulled since reset
    this.skipped = 0; // of these: samples that were cut from the take afterwards
    this.ended = false;
    this.state = "waiting"; // waiting -> playing <-> starved -> done
    this.hold = Math.round(startBuffer * this.rate);
    this.gaps = []; // {at: sample index, samples: length of the silence}
    this.fade = 0; // samples left of a fade-out after stop()
  }

  push(block) {
    if (this.ended || !block.length) return;
    this.blocks.push(block);
    this.queued += block.length;
  }

  // Forget everything after the first `kept` samples of the take: what is not heard yet will not be.
  truncate(kept) {
    const excess = this.played - this.skipped + this.queued - kept;
    if (excess <= 0) return;
    let drop = Math.min(excess, this.queued);
    this.skipped += excess - drop;
    this.queued -= drop;
    while (drop > 0) {
      const last = this.blocks.length - 1;
      const left = this.blocks[last].length - (last ? 0 : this.offset);
      if (left > drop) {
        this.blocks[last] = this.blocks[last].subarray(0, this.blocks[last].length - drop);
        return;
      }
      this.blocks.pop();
      if (!last) this.offset = 0;
      drop -= left;
    }
  }

  end() {
    this.ended = true;
  }

  // Silence within 5 ms: a hard cut clicks.
  stop() {
    this.ended = true;
    if (this.state === "playing") this.fade = Math.min(this.queued, Math.round(0.005 * this.rate));
    else this.clear();
  }

  clear() {
    this.blocks = [];
    this.queued = 0;
    this.offset = 0;
    this.state = "done";
  }

  // Fill `out`; returns the index in it of the very first sample of this reset, or -1.
  pull(out) {
    out.fill(0);
    if (this.state === "done") return -1;
    if (this.state !== "playing") {
      if (!this.queued && this.ended) { this.state = "done"; return -1; }
      if (!this.queued || (this.queued < this.hold && !this.ended)) {
        if (this.state === "starved") this.gaps[this.gaps.length - 1].samples += out.length;
        return -1;
      }
      this.state = "playing";
    }
    const first = this.played === 0 ? 0 : -1;
    let at = 0;
    while (at < out.length && this.blocks.length) {
      const block = this.blocks[0];
      const count = Math.min(out.length - at, block.length - this.offset);
      out.set(block.subarray(this.offset, this.offset + count), at);
      at += count;
      this.offset += count;
      if (this.offset === block.length) { this.blocks.shift(); this.offset = 0; }
    }
    this.played += at;
    this.queued -= at;
    if (this.fade > 0) {
      const length = Math.round(0.005 * this.rate);
      for (let i = 0; i < out.length; i++) out[i] *= Math.max(0, this.fade - i) / length;
      this.fade -= out.length;
      if (this.fade <= 0) this.clear();
    } else if (at < out.length) {
      if (this.ended) this.state = "done";
      else {
        this.state = "starved";
        this.gaps.push({ at: this.played, samples: out.length - at });
        this.hold = Math.round(0.2 * this.rate); // refill a little, or every next block would be a gap of its own
      }
    }
    return first;
  }
}
