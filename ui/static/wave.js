// The waveform: one bar per few pixels, played part in the accent colour, redrawn at most once a frame.
const WINDOW = 240; // samples a peak: 10 ms

export class Wave {
  constructor() {
    this.clear();
    new MutationObserver(() => this.draw()).observe(document.documentElement, { attributes: true, attributeFilter: ["class"] });
    addEventListener("resize", () => this.draw());
  }

  clear() {
    this.peaks = [];
    this.samples = 0;
    this.partial = 0;
    this.played = 0;
    this.rms = [];
    this.energy = 0;
  }

  add(pcm) {
    for (let i = 0; i < pcm.length; i++) {
      const level = Math.abs(pcm[i]);
      if (level > this.partial) this.partial = level;
      this.energy += level * level;
      if (++this.samples % WINDOW === 0) {
        this.peaks.push(this.partial);
        this.rms.push(Math.sqrt(this.energy / WINDOW));
        this.partial = 0;
        this.energy = 0;
      }
    }
    this.draw();
  }

  // Forget what comes after so many samples.
  cut(samples) {
    this.samples = Math.min(this.samples, Math.floor(samples / WINDOW) * WINDOW);
    this.peaks.length = this.rms.length = this.samples / WINDOW;
    this.partial = this.energy = 0;
    this.draw();
  }

  // Level of what is heard now, 0 to 1 on a scale of -50 to 0 dBFS.
  level() {
    const rms = this.rms[Math.floor(this.played / WINDOW)] ?? 0;
    return rms > 0 ? Math.max(0, 1 + (20 * Math.log10(rms)) / 50) : 0;
  }

  draw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.#paint(document.getElementById("ch-wave"));
    });
  }

  #paint(canvas) {
    if (!canvas) return;
    const scale = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== width * scale || canvas.height !== height * scale) {
      canvas.width = width * scale;
      canvas.height = height * scale;
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const played = style.getPropertyValue("--ch-played"), waiting = style.getPropertyValue("--ch-waiting");
    const step = 4, bars = Math.floor(width / step);
    const span = Math.max(this.peaks.length, 400); // at least 4 s across, so that the first bars do not jump
    const loudest = Math.max(0.2, ...maxima(this.peaks));
    for (let bar = 0; bar < bars; bar++) {
      const from = Math.floor((bar * span) / bars), to = Math.max(from + 1, Math.floor(((bar + 1) * span) / bars));
      if (from >= this.peaks.length) {
        pen.fillStyle = waiting;
        pen.fillRect(bar * step + 1, height / 2 - 0.5, step - 2, 1);
        continue;
      }
      let peak = 0;
      for (let i = from; i < to && i < this.peaks.length; i++) peak = Math.max(peak, this.peaks[i]);
      const tall = Math.max(2, (peak / loudest) * (height - 6));
      pen.fillStyle = from * WINDOW < this.played ? played : waiting;
      pen.fillRect(bar * step + 1, (height - tall) / 2, step - 2, tall);
    }
  }
}

// Math.max(...array) fails on long arrays.
function maxima(values) {
  const parts = [];
  for (let i = 0; i < values.length; i += 4096) parts.push(Math.max(...values.slice(i, i + 4096)));
  return parts;
}
