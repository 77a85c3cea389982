// The page's own program: Speak, Stop, and what is shown meanwhile. Gradio's buttons call window.chorus.
import { nameAsTheyRead, recordUntouched, type } from "./fields.js";
import { Parts } from "./parts.js";
import { Player, RATE } from "./player.js";
import { refusal, save } from "./save.js";
import { Take } from "./take.js";
import { Takes } from "./takes.js";
import { Wave } from "./wave.js";
import { records } from "./wire.js";

const EARLY = { length: "it reached its length limit", silence: "it fell silent", loop: "it repeated itself",
                deadline: "time was up", cancelled: "it was cancelled", error: "the engine failed" };
const ANOTHER_SEED_HELPS = ["length", "silence", "loop"];

const byId = (id) => document.getElementById(id);
const show = (id, text) => { const e = byId(id); if (e && e.textContent !== text) e.textContent = text; };

const wave = new Wave();
const player = new Player(onReport);
const parts = new Parts({ again: sayAgain, from: goOn });
let current = null; // the take being made or played

function status(text, kind = "") {
  show("ch-status", text);
  byId("ch-status")?.setAttribute("data-kind", kind);
}

// settings: the fields of /chorus/speak, plus voice_label and start_buffer for this page.
async function speak(settings) {
  stop("");
  const take = begin(new Take(settings));
  if (!take.text.trim()) return fail(take, "Nothing to say: type a text first.");
  await say(take, 0, settings.text, settings.seed);
}

// After a part that failed, or a stop: that part and the rest, behind the parts that are there.
async function goOn(part) {
  const record = current?.record;
  if (!record) return;
  const take = begin(Take.resume(record, part));
  await say(take, part, record.texts.slice(part).join(" "), undefined);
}

async function sayAgain(part) {
  const record = current?.record;
  if (!record) return;
  const take = begin(Take.again(record, part));
  await say(take, part, record.texts[part], undefined);
}

function begin(take) {
  current = take;
  document.body.classList.add("ch-speaking");
  reset();
  wave.clear();
  take.blocks.forEach((block) => wave.add(block));
  if (take.seed !== null) show("ch-seed", String(take.seed));
  wave.draw();
  return take;
}

// One request, and others for parts that fail. The take is what all of them give.
async function say(take, first, text, seed) {
  const run = take.run(first, text, seed);
  const { voice_label: _, start_buffer: startBuffer = 0, ...body } = { ...take.settings, text };
  if (seed === undefined) delete body.seed;
  else body.seed = String(seed);
  take.abort = new AbortController();
  take.again = null;
  if (!take.retried.size) status("Waiting for the first sound …", "busy");
  try {
    // The sound card wakes up while the engine works.
    const [answer] = await Promise.all([
      fetch("/chorus/speak", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: take.abort.signal,
      }),
      player.open(),
    ]);
    if (current !== take || take.over) return;
    if (!answer.ok) return fail(take, await refusal(answer));
    if (!take.playing) player.begin(startBuffer);
    take.playing = true;
    for await (const record of records(answer.body)) {
      if (current !== take || take.over) return;
      if (record.pcm) onPcm(take, record.pcm);
      else onEvent(take, run, record.json);
    }
    if (!take.finished && !take.again) fail(take, "The connection broke off; what was heard so far is kept below.");
  } catch (error) {
    if (error.name !== "AbortError" && current === take) fail(take, `The server cannot be reached (${error.message}).`);
  }
  if (take.again && current === take && !take.over) await say(take, take.again.first, take.again.text, take.again.seed);
}

// After a stop, the server is told twice: by the closed connection, and by name (proxies may hide the first).
function stop(message = "Stopped.") {
  const take = current;
  if (!take || take.over) return;
  player.stop();
  if (!take.finished) {
    take.abort?.abort();
    if (take.id) fetch(`/chorus/cancel/${take.id}`, { method: "POST", keepalive: true }).catch(() => {});
    take.finished = true;
    if (take.alone !== undefined) take.failed = take.alone;
    keep(take, { finish_reason: "stopped" });
  }
  over(take);
  if (message) status(message);
}

function onEvent(take, run, event) {
  if (event.event === "start") {
    take.started(run, event);
    show("ch-seed", String(take.seed));
    byId("ch-reuse").hidden = false;
    showSpoken(take);
    parts.show(take);
  } else if (event.event === "queue") {
    if (!take.received) status(event.position ? `Waiting: number ${event.position} in the queue …` : "Waiting for the first sound …", "busy");
  } else if (event.event === "chunk") {
    take.begins(run, event.starts);
  } else if (event.event === "end") {
    onEnd(take, run, event);
  } else if (event.event === "error") {
    fail(take, event.message);
  }
}

function onEnd(take, run, event) {
  const early = EARLY[event.finish_reason] && ((take.texts.length === 1 && event.detail) || EARLY[event.finish_reason]);
  if (early) take.failed = take.alone ?? take.done;
  else take.done = take.texts.length;
  const name = `Part ${(take.failed ?? 0) + 1} of ${take.texts.length}`;
  if (early && ANOTHER_SEED_HELPS.includes(event.finish_reason) && take.texts.length > 1 && !run.alone && !take.retried.has(take.failed)) {
    take.again = take.retry();
    take.announcing = true; // what has failed, until sound comes again
    wave.cut(take.received);
    player.truncate(take.received - take.offset);
    status(`${name} failed (${early}); it is said again with another seed …`, "warning");
    return parts.show(take);
  }
  take.finished = true;
  player.end();
  show("ch-speed", event.x_real_time.toFixed(2));
  if (event.ttfa_ms !== null && !take.retried.size) show("ch-first-engine", `engine ${Math.round(event.ttfa_ms)} ms`);
  if (early) {
    take.note = take.texts.length === 1 ? `Ended early: ${early}.` : `${name} failed: ${early}. `
      + (run.alone ? "The take is as it was." : "The parts before it are kept; go on from it below.");
  }
  keep(take, event);
  if (!take.received) { status(take.note || "No sound came.", "error"); over(take); }
  parts.show(take);
}

function onPcm(take, pcm) {
  take.add(pcm);
  take.announcing = false;
  take.firstReceivedAt ??= performance.now();
  take.lastReceivedAt = performance.now();
  player.push(pcm.slice());
  wave.add(pcm);
  const elapsed = (performance.now() - take.clickedAt) / 1000;
  show("ch-speed", ((take.received - take.offset) / RATE / elapsed).toFixed(2));
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
  }
  take.played = report.played;
  take.gaps = report.gaps.map((gap) => ({ ...gap }));
  take.position = take.offset + report.played - report.skipped;
  const part = take.texts.length > 1 ? take.partAt(take.position - 1) + 1 : 0;
  if (report.played && !take.announcing) {
    status(part ? `Speaking part ${part} of ${take.texts.length} …` : take.replay ? "Playing a take …" : "Speaking …", "busy");
  }
  parts.show(take);
  wave.played = take.position;
  wave.draw();
  show("ch-time", `${(take.position / RATE).toFixed(1)} s`);
  show("ch-buffer", `${(report.queued / RATE).toFixed(1)} s`);
  const silent = report.gaps.reduce((sum, gap) => sum + gap.samples, 0) / RATE;
  show("ch-gaps", report.gaps.length ? `${report.gaps.length} gap${report.gaps.length > 1 ? "s" : ""}, ${silent.toFixed(1)} s` : "no gaps");
  byId("ch-level")?.style.setProperty("width", `${100 * wave.level()}%`);
  if (report.state === "done") {
    const again = [...take.retried].map((part) => part + 1).join(", ");
    status(take.note || (take.replay ? "Replayed." : again ? `Done; part ${again} was said again with another seed.` : "Done."),
           take.note ? "warning" : "done");
    over(take);
  }
}

function fail(take, message) {
  player.stop();
  take.finished = true;
  if (take.texts.length > 1) take.failed = take.alone ?? take.done;
  keep(take, { finish_reason: "error", detail: message });
  status(message, "error");
  over(take);
}

function over(take) {
  take.over = true;
  document.body.classList.remove("ch-speaking");
  byId("ch-level")?.style.setProperty("width", "0");
  parts.show(take);
}

// Move a take into the list, once, with all its samples in one array. Where nothing new came, the old one stays.
function keep(take, ending) {
  if (take.kept) return;
  take.kept = true;
  const nothing = take.received <= take.offset || (take.alone !== undefined && take.failed !== null);
  if (nothing) {
    take.record = takes.list.find((other) => other.at === take.at) ?? null;
    return;
  }
  take.record = takes.add(take.toRecord(ending));
  take.pcm = take.record.pcm;
  show("ch-length", `of ${(take.received / RATE).toFixed(1)} s`);
}

// keepPosition: go on where the take that plays now is, to compare the two at the same words.
async function replay(kept, keepPosition = false) {
  const at = keepPosition && current && !current.over ? Math.min(current.position ?? 0, kept.pcm.length) : 0;
  stop("");
  const take = new Take(kept.settings);
  Object.assign(take, { starts: [], runs: [], texts: [kept.text], done: 1, failed: null }, kept, { offset: at, replay: true,
                        finished: true, kept: true, received: kept.pcm.length, record: kept });
  begin(take);
  wave.add(kept.pcm);
  show("ch-length", `of ${(kept.pcm.length / RATE).toFixed(1)} s`);
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
  box.open = take.texts.length === 1 && take.spoken.trim() !== take.text.trim(); // parts have a list of their own
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
  nameAsTheyRead();
  const list = byId("ch-takes");
  if (list && !list.dataset.filled) { list.dataset.filled = "1"; takes.render(); wave.draw(); }
}).observe(document.body, { childList: true, subtree: true });

window.chorus = { speak, stop, save, player, takes, get current() { return current; } };
