// Plays float32 PCM at 24 kHz while it arrives. Samples go to the sound card as they are: the audio context runs at
// 24 kHz, so nothing in the page resamples them.
import { PcmQueue } from "./pcm_queue.js";

export const RATE = 24000;

export class Player {
  constructor(onReport) {
    this.onReport = onReport; // ({played, skipped, queued, state, gaps, firstAt}) => void
    this.take = 0;
    this.opening = null;
  }

  // Build the audio graph ahead of time; it stays silent and asleep until open().
  prepare() {
    return (this.opening ??= this.#build());
  }

  // Wake it. Needs a user's gesture behind it the first time.
  async open() {
    await this.prepare();
    if (this.context.state !== "running") await this.context.resume();
  }

  begin(startBuffer = 0) {
    this.take += 1;
    this.#send({ reset: true, startBuffer });
    return this.take;
  }

  push(pcm) { this.#send({ push: pcm }); } // Float32Array; the caller keeps its own copy
  truncate(kept) { this.#send({ truncate: kept }); } // samples since begin()
  end() { this.#send({ end: true }); }
  stop() { this.#send({ stop: true }); }

  async #build() {
    this.context = new AudioContext({ sampleRate: RATE, latencyHint: "interactive" });
    if (this.context.audioWorklet) {
      await this.context.audioWorklet.addModule(new URL("./worklet.js", import.meta.url));
      this.node = new AudioWorkletNode(this.context, "chorus-player", { numberOfInputs: 0, outputChannelCount: [1] });
      this.node.port.onmessage = ({ data }) => this.#report(data);
      this.#send = (message) => this.node.port.postMessage({ take: this.take, ...message });
    } else {
      this.#buildFallback();
    }
    this.node.connect(this.context.destination);
  }

  // Pages on plain http (other than localhost) have no AudioWorklet: the same queue on the old script node.
  #buildFallback() {
    const queue = new PcmQueue(RATE);
    queue.state = "done";
    this.node = this.context.createScriptProcessor(1024, 0, 1);
    let reported = 0;
    this.node.onaudioprocess = (event) => {
      const take = this.take;
      const first = queue.pull(event.outputBuffer.getChannelData(0));
      if (queue.state === "done" && reported === take) return;
      if (queue.state === "done") reported = take;
      this.#report({
        take, played: queue.played, skipped: queue.skipped, queued: queue.queued, state: queue.state, gaps: queue.gaps,
        first: first >= 0,
      });
    };
    this.#send = (message) => {
      if (message.reset) queue.reset(message.startBuffer);
      else if (message.push) queue.push(message.push);
      else if (message.truncate !== undefined) queue.truncate(message.truncate);
      else if (message.end) queue.end();
      else if (message.stop) queue.stop();
    };
  }

  #send = () => {};

  #report(report) {
    if (report.take !== this.take) return;
    // The message comes just after the sample was handed over; the sound card adds its latency.
    const firstAt = report.first ? performance.now() + 1000 * (this.context.outputLatency || 0) : null;
    this.onReport({ ...report, firstAt });
  }
}
