// This browser's takes: kept in IndexedDB (nothing of them stays on the server), listed with player and downloads.
import { RATE } from "./player.js";
import { download } from "./save.js";
import { wavBlob } from "./wire.js";

const KEEP = 20;
const db = openDatabase();

function openDatabase() {
  return new Promise((resolve) => {
    const request = indexedDB.open("chorus", 1);
    request.onupgradeneeded = () => request.result.createObjectStore("takes", { keyPath: "at" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => resolve(null); // private windows: takes live as long as the page
  });
}

function store(mode, action) {
  return db.then((base) => base && new Promise((resolve, reject) => {
    const done = action(base.transaction("takes", mode).objectStore("takes"));
    done.onsuccess = () => resolve(done.result);
    done.onerror = () => reject(done.error);
  }));
}

export class Takes {
  constructor(replay) {
    this.replay = replay; // (take, keepPosition) => void
    this.list = [];
    this.pair = []; // at most two takes to compare
    store("readonly", (takes) => takes.getAll()).then((all) => { this.list = (all ?? []).concat(this.list); this.render(); });
  }

  // take: what Take.toRecord gives. One with the same `at` is replaced.
  add(take) {
    this.list = this.list.filter((other) => other.at !== take.at);
    this.list.push(take);
    store("readwrite", (takes) => takes.put(take)).catch(() => {});
    while (this.list.length > KEEP) this.#forget(this.list[0]);
    this.render();
    return take;
  }

  clear() {
    this.list = [];
    store("readwrite", (takes) => takes.clear()).catch(() => {});
    this.render();
  }

  #forget(take) {
    this.list = this.list.filter((other) => other !== take);
    store("readwrite", (takes) => takes.delete(take.at)).catch(() => {});
  }

  render() {
    const root = document.getElementById("ch-takes");
    if (!root) return;
    document.getElementById("ch-takes-box").hidden = !this.list.length;
    root.replaceChildren(...this.list.toReversed().map((take) => this.#row(take)));
    this.pair = this.pair.filter((take) => this.list.includes(take));
    const bar = document.getElementById("ch-compare");
    bar.hidden = this.pair.length < 2;
    bar.replaceChildren("Compare, switching at the same moment: ", ...this.pair.map((take, i) =>
      button(`${"AB"[i]} · seed ${take.seed}`, `Hear take ${"AB"[i]} from where the other one is`, () => this.replay(take, true))));
  }

  #row(take) {
    const row = document.createElement("li");
    const seconds = take.pcm.length / RATE;
    const about = [
      `${seconds.toFixed(1)} s`, take.settings.voice_label || take.settings.speaker || "voice", `seed ${take.seed}`,
      take.ending?.finish_reason === "stop" ? "" : take.ending?.finish_reason ?? "stopped",
    ].filter(Boolean).join(" · ");
    const name = `chorus-${take.seed}-${slug(take.text)}`;
    row.append(
      button("▶", `Play take: ${take.text.slice(0, 60)}`, () => this.replay(take), "ch-play"),
      element("span", "ch-take-text", take.text),
      element("span", "ch-take-about", about),
    );
    const actions = element("span", "ch-take-actions");
    actions.append(
      button("wav", "Download as wav", () => download(wavBlob(take.pcm, RATE), `${name}.wav`)),
      button("flac", "Download as flac", () => encoded(take.pcm, "flac", name)),
      button("mp3", "Download as mp3", () => encoded(take.pcm, "mp3", name)),
      button("json", "Download the settings of this take", () => download(new Blob([settingsJson(take)], { type: "application/json" }), `${name}.json`)),
      button("curl", "Copy as a curl command", (event) => copy(event.currentTarget, curl(take))),
      button(this.pair.includes(take) ? `is ${"AB"[this.pair.indexOf(take)]}` : "A/B", "Compare this take with another", () => {
        this.pair = this.pair.includes(take) ? this.pair.filter((other) => other !== take) : [...this.pair, take].slice(-2);
        this.render();
      }),
      button("✕", "Forget this take", () => { this.#forget(take); this.render(); }),
    );
    row.append(actions);
    return row;
  }
}

export function settingsJson(take) {
  const parts = take.texts?.map((text, i) => ({ text, seed: take.starts[i]?.seed ?? null }));
  return JSON.stringify({ ...take.settings, seed: take.seed, spoken_text: take.text, parts, requests: take.runs, result: take.ending }, null, 2);
}

// The same take from a shell, by the OpenAI-compatible route of this server; a command for each request that it took.
export function curl(take) {
  if (!(take.runs?.length > 1)) return command(take, take.settings.text, take.seed, "take.wav");
  return take.runs.map((run) => command(take, run.text, run.seed, `take-part-${run.first + 1}.wav`)).join("\n");
}

function command(take, text, seed, file) {
  const s = take.settings;
  const body = { input: text, response_format: "wav", language: s.language, seed, ...s.sampling };
  if (s.voice && !s.voice.startsWith("clip:")) body.voice = s.voice;
  if (s.voice?.startsWith("clip:")) body.ref_audio = "data:audio/wav;base64,<your clip>";
  if (s.transcript) body.ref_text = s.transcript;
  if (s.speaker) body.voice = s.speaker;
  if (s.instruct) body.instructions = s.instruct;
  if (s.x_vector_only) body.x_vector_only_mode = true;
  const json = JSON.stringify(body).replaceAll("'", "'\\''");
  const options = document.querySelector("meta[name=chorus-curl]")?.content ?? ""; // certificate, password
  return `curl -s ${options}${location.origin}/v1/audio/speech -H 'Content-Type: application/json' -d '${json}' -o ${file}`;
}

async function encoded(pcm, container, name) {
  const samples = await wavBlob(pcm, RATE).slice(44).arrayBuffer();
  const answer = await fetch(`/chorus/encode/${container}`, { method: "POST", body: samples });
  if (answer.ok) download(await answer.blob(), `${name}.${container}`);
}

async function copy(target, text) {
  try {
    await navigator.clipboard.writeText(text);
    target.textContent = "copied";
  } catch {
    prompt("Copy this command:", text); // no clipboard on plain http
  }
  setTimeout(() => { target.textContent = "curl"; }, 1500);
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function button(label, title, action, className = "") {
  const made = element("button", `ch-small ${className}`, label);
  made.type = "button";
  made.title = title;
  made.setAttribute("aria-label", title);
  made.addEventListener("click", action);
  return made;
}

function slug(text) {
  return text.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 30) || "take";
}
