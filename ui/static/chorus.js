// The page's own program: Speak, Stop, and what is shown meanwhile. Gradio's buttons call window.chorus.
import { Player, RATE } from "./player.js";
import { Takes } from "./takes.js";
import { Wave } from "./wave.js";
import { records } from "./wire.js";

const byId = (id) => document.getElementById(id);
const show = (id, text) => { const e = byId(id); if (e && e.textContent !== text) e.textContent = text; };

const wave = new Wave();
const player = new Player(onReport);
let current = null; // the take being made or played

function status(text, kind = "") {
  show("ch-status", text);
  byId("ch-status")?.setAttribute("data-kind", kind);
}

// settings: the fields of /chorus/speak, plus voice_label for people.
async function speak(settings) {
  const clickedAt = performance.now();
  stop("");
  const take = { at: Date.now(), settings, seed: null, text: settings.text ?? "", pcm: new Float32Array(0), parts: [],
                 clickedAt, abort: new AbortController(), received: 0, finished: false };
  current = take;
  document.body.classList.add("ch-speaking");
  wave.clear();
  wave.draw();
  reset();
  if (!take.text.trim()) return fail(take, "Nothing to say: type a text first.");
  status("Waiting for the first sound …", "busy");
  take.waiting = setInterval(() => tellQueue(take), 1500);
  try {
    const { voice_label: _, start_buffer: startBuffer = 0, ...body } = settings;
    // The sound card wakes up while the engine works.
    const [answer] = await Promise.all([
      fetch("/chorus/speak", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: take.abort.signal,
      }),
      player.open(),
    ]);
    if (current !== take) return;
    if (!answer.ok) return fail(take, await refusal(answer));
    player.begin(startBuffer);
    for await (const record of records(answer.body)) {
      if (current !== take) return;
      if (record.pcm) onPcm(take, record.pcm);
      else onEvent(take, record.json);
    }
    if (!take.finished) fail(take, "The connection broke off; what was heard so far is kept below.");
  } catch (error) {
    if (error.name !== "AbortError" && current === take) fail(take, `The server cannot be reached (${error.message}).`);
  }
}

// After a stop, the server is told twice: by the closed connection, and by name (proxies may hide the first).
function stop(message = "Stopped.") {
  const take = current;
  if (!take || take.over) return;
  player.stop();
  if (!take.finished) {
    take.abort.abort();
    if (take.id) fetch(`/chorus/cancel/${take.id}`, { method: "POST", keepalive: true }).catch(() => {});
    keep(take, { finish_reason: "stopped" });
  }
  over(take);
  if (message) status(message);
}

function onEvent(take, event) {
  if (event.event === "start") {
    take.id = event.id;
    take.seed = event.seed;
    take.spoken = event.text;
    show("ch-seed", String(event.seed));
    byId("ch-reuse").hidden = false;
    showSpoken(take);
  } else if (event.event === "end") {
    take.finished = true;
    player.end();
    show("ch-speed", event.x_real_time.toFixed(2));
    if (event.ttfa_ms !== null) show("ch-first-engine", `engine ${Math.round(event.ttfa_ms)} ms`);
    keep(take, event);
    const early = { length: "it reached its length limit", silence: "it fell silent", loop: "it repeated itself",
                    deadline: "time was up", cancelled: "it was cancelled", error: "the engine failed" }[event.finish_reason];
    if (early) take.note = `Ended early: ${event.detail || early}.`;
    if (!take.received) { status(take.note || "No sound came.", "error"); over(take); }
  } else if (event.event === "error") {
    fail(take, event.message);
  }
}

function onPcm(take, pcm) {
  take.parts.push(pcm);
  take.received += pcm.length;
  take.firstReceivedAt ??= performance.now();
  take.lastReceivedAt = performance.now();
  player.push(pcm.slice());
  wave.add(pcm);
  const elapsed = (performance.now() - take.clickedAt) / 1000;
  show("ch-speed", (take.received / RATE / elapsed).toFixed(2));
  show("ch-length", `of ${(take.received / RATE).toFixed(1)} s${take.finished ? "" : " so far"}`);
}

function onReport(report) {
  const take = current;
  if (!take || take.over) return;
  if (report.firstAt !== null && take.firstPlayedAt === undefined) {
    take.firstPlayedAt = report.firstAt;
    take.receivedAtFirstPlay = take.received;
    if (!take.replay) {
      show("ch-first", `${Math.max(0, Math.round(report.firstAt - take.clickedAt))} ms`);
      show("ch-first-engine", "click to sound");
    }
    status("Speaking …", "busy");
  }
  take.played = report.played;
  take.gaps = report.gaps.map((gap) => ({ ...gap }));
  take.position = (take.offset ?? 0) + report.played;
  wave.played = take.position;
  wave.draw();
  show("ch-time", `${(take.position / RATE).toFixed(1)} s`);
  show("ch-buffer", `${(report.queued / RATE).toFixed(1)} s`);
  const silent = report.gaps.reduce((sum, gap) => sum + gap.samples, 0) / RATE;
  show("ch-gaps", report.gaps.length ? `${report.gaps.length} gaps, ${silent.toFixed(1)} s` : "no gaps");
  byId("ch-level")?.style.setProperty("width", `${100 * wave.level()}%`);
  if (report.state === "done") {
    status(take.note || (take.replay ? "Replayed." : "Done."), take.note ? "warning" : "done");
    over(take);
  }
}

function fail(take, message) {
  player.stop();
  if (take.received) keep(take, { finish_reason: "error", detail: message });
  status(message, "error");
  take.finished = true;
  over(take);
}

// Why nothing is heard yet, when it takes long.
async function tellQueue(take) {
  if (take.received || take.over) return clearInterval(take.waiting);
  const now = await fetch("/chorus/status").then((answer) => answer.json()).catch(() => null);
  if (take.received || take.over || !now?.metrics) return;
  const { active = 0, waiting = 0 } = now.metrics;
  if (waiting > 0) status(`Waiting: ${active} requests are being spoken, ${waiting} are in the queue …`, "busy");
}

function over(take) {
  take.over = true;
  clearInterval(take.waiting);
  document.body.classList.remove("ch-speaking");
  byId("ch-level")?.style.setProperty("width", "0");
}

// Move a take into the list, once, with all its samples in one array.
function keep(take, ending) {
  if (take.kept || !take.received) return;
  take.kept = true;
  take.pcm = new Float32Array(take.received);
  take.parts.reduce((at, part) => { take.pcm.set(part, at); return at + part.length; }, 0);
  show("ch-length", `of ${(take.received / RATE).toFixed(1)} s`);
  takes.add({ at: take.at, settings: take.settings, seed: take.seed, text: take.spoken, pcm: take.pcm, ending });
}

// keepPosition: go on where the take that plays now is, to compare the two at the same words.
async function replay(kept, keepPosition = false) {
  const at = keepPosition && current && !current.over ? Math.min(current.position ?? 0, kept.pcm.length) : 0;
  stop("");
  current = { ...kept, offset: at, replay: true, finished: true, kept: true, received: kept.pcm.length, clickedAt: performance.now() };
  reset();
  wave.clear();
  wave.add(kept.pcm);
  show("ch-seed", String(kept.seed));
  show("ch-length", `of ${(kept.pcm.length / RATE).toFixed(1)} s`);
  document.body.classList.add("ch-speaking");
  status("Playing a take …", "busy");
  await player.open();
  player.begin(0);
  player.push(kept.pcm.slice(at));
  player.end();
}

function showSpoken(take) {
  const box = byId("ch-spoken");
  if (!box) return;
  box.hidden = false;
  box.open = take.spoken.trim() !== take.text.trim();
  show("ch-spoken-text", take.spoken);
}

function reset() {
  for (const id of ["ch-first", "ch-speed", "ch-buffer", "ch-time", "ch-seed"]) show(id, "–");
  show("ch-first-engine", "\u00a0");
  show("ch-length", "\u00a0");
  show("ch-gaps", "no gaps");
  byId("ch-reuse").hidden = true;
  byId("ch-spoken").hidden = true;
}

async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

// Put a value into a Gradio input as if it had been typed.
function type(rootId, value) {
  const input = document.querySelector(`#${rootId} textarea, #${rootId} input`);
  if (!input) return;
  Object.getOwnPropertyDescriptor(Object.getPrototypeOf(input), "value").set.call(input, value);
  input.dispatchEvent(new Event("input", { bubbles: true }));
  input.dispatchEvent(new Event("blur", { bubbles: true }));
}

// Voices are recorded as they are: the browser's clean-up for calls changes them.
function recordUntouched() {
  const devices = navigator.mediaDevices;
  if (!devices?.getUserMedia) return;
  const original = devices.getUserMedia.bind(devices);
  devices.getUserMedia = (wanted) => {
    if (wanted?.audio) {
      const audio = typeof wanted.audio === "object" ? wanted.audio : {};
      wanted = { ...wanted, audio: { ...audio, echoCancellation: false, noiseSuppression: false, autoGainControl: false } };
    }
    return original(wanted);
  };
}

recordUntouched();
document.body.classList.toggle("ch-insecure", !window.isSecureContext); // no microphone there, says a note
const takes = new Takes(replay);
document.addEventListener("click", (event) => {
  if (event.target.id === "ch-clear") takes.clear();
  if (event.target.id === "ch-reuse" && current) type("seed", String(current.seed));
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("speak")?.click();
  if (event.key === "Escape") stop();
});
// The audio graph is built with the page and woken by the first gesture, so that Speak finds it awake.
player.prepare().catch(() => {});
for (const gesture of ["pointerdown", "keydown"]) {
  document.addEventListener(gesture, () => player.open().catch(() => {}), { once: true });
}
addEventListener("pagehide", () => { if (current && !current.over) stop(""); });
// Gradio builds the page after this script ran, and again when a tab is shown for the first time.
new MutationObserver(() => {
  const list = byId("ch-takes");
  if (list && !list.dataset.filled) { list.dataset.filled = "1"; takes.render(); wave.draw(); }
}).observe(document.body, { childList: true, subtree: true });

window.chorus = { speak, stop, player, takes, get current() { return current; } };
