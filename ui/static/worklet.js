// The player's end in the audio thread.
import { PcmQueue } from "./pcm_queue.js";

class ChorusPlayer extends AudioWorkletProcessor {
  constructor() {
    super();
    this.queue = new PcmQueue(sampleRate);
    this.queue.state = "done";
    this.take = 0;
    this.blocks = 0;
    this.port.onmessage = ({ data }) => {
      if (data.reset) { this.take = data.take; this.queue.reset(data.startBuffer); }
      else if (data.take !== this.take) return; // of a take that is over
      else if (data.push) this.queue.push(data.push);
      else if (data.truncate !== undefined) this.queue.truncate(data.truncate);
      else if (data.end) this.queue.end();
      else if (data.stop) this.queue.stop();
    };
  }

  process(_inputs, outputs) {
    const queue = this.queue;
    if (queue.state === "done" && this.reported === this.take) return true;
    const first = queue.pull(outputs[0][0]) >= 0;
    const done = queue.state === "done";
    if (first || done || this.blocks++ % 6 === 0) { // about every 30 ms
      this.port.postMessage({
        take: this.take, played: queue.played, skipped: queue.skipped, queued: queue.queued, state: queue.state, gaps: queue.gaps,
        first,
      });
    }
    if (done) this.reported = this.take;
    return true;
  }
}

registerProcessor("chorus-player", ChorusPlayer);
