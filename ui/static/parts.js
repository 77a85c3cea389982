// The parts of a long text: a list in the player, and marks in the preview table of the text.
const WORDS = { waiting: "to come", making: "being made", made: "", failed: "failed", missing: "not said" };

export class Parts {
  // again(i): say part i once more, alone. from(i): say it and those after it.
  constructor({ again, from }) {
    this.actions = { again, from };
    this.shown = "";
    document.addEventListener("click", ({ target }) => {
      const { action, part } = target.dataset ?? {};
      if (action && target.closest("#ch-parts")) this.actions[action](Number(part));
    });
  }

  // Cheap enough for every report of the player: draws only what has changed.
  show(take) {
    const box = document.getElementById("ch-parts-box");
    if (!box) return;
    const many = take && take.texts?.length > 1;
    const now = many && !take.over ? take.partAt(Math.max(0, (take.position ?? take.offset) - 1)) : -1;
    const rows = document.querySelectorAll("#parts tr[data-part]");
    const states = many ? take.texts.map((_, i) => take.state(i)) : [];
    const key = JSON.stringify([take?.at, take?.texts, states, now, take?.over, rows.length, take?.runs?.length]);
    if (key === this.shown) return;
    this.shown = key;
    box.hidden = !many;
    this.#mark(rows, many ? take.texts : [], states, now);
    if (!many) return;
    document.getElementById("ch-part-now").textContent = now >= 0 ? `${now + 1} of ${states.length}` : `${states.length}`;
    const list = document.getElementById("ch-parts");
    const focused = list.contains(document.activeElement) ? document.activeElement.dataset.part : null;
    list.replaceChildren(...take.texts.map((text, i) => this.#row(take, text, i, states[i], i === now)));
    list.children[now]?.scrollIntoView({ block: "nearest" });
    if (focused !== null) list.querySelector(`button[data-part="${focused}"]`)?.focus({ preventScroll: true });
  }

  #row(take, text, i, state, now) {
    const row = document.createElement("li");
    row.dataset.state = state;
    if (now) row.setAttribute("aria-current", "true");
    const about = [now ? "heard now" : WORDS[state], take.seedOf(i) === undefined ? "" : `seed ${take.seedOf(i)}`].filter(Boolean);
    row.append(span("ch-part-text", text), span("ch-part-about", about.join(" · ")));
    if (!take.over) return row;
    const action = state === "made" ? "again" : "from";
    if (action === "from" && i > (take.old ?? take).done) return row; // parts are said in order
    const button = document.createElement("button");
    button.type = "button";
    button.className = "ch-small";
    button.textContent = action === "again" ? "Say again" : "Go on from here";
    button.setAttribute("aria-label", `${button.textContent}: part ${i + 1}`);
    Object.assign(button.dataset, { action, part: i });
    row.append(button);
    return row;
  }

  // Only where the table shows the very text that is spoken.
  #mark(rows, texts, states, now) {
    const same = rows.length === texts.length && [...rows].every((row, i) => row.cells[1].textContent === texts[i]);
    rows.forEach((row, i) => {
      if (same) row.dataset.state = states[i];
      else delete row.dataset.state;
      if (same && i === now) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
  }
}

function span(className, text) {
  const made = document.createElement("span");
  made.className = className;
  made.textContent = text;
  return made;
}
