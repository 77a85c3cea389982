// What the page does to the browser and to Gradio's fields.

// Put a value into a Gradio input as if it had been typed.
export function type(rootId, value) {
  const input = document.querySelector(`#${rootId} textarea, #${rootId} input`);
  if (!input) return;
  Object.getOwnPropertyDescriptor(Object.getPrototypeOf(input), "value").set.call(input, value);
  input.dispatchEvent(new Event("input", { bubbles: true }));
  input.dispatchEvent(new Event("blur", { bubbles: true }));
}

// Some buttons are named otherwise than they read: who speaks to the computer could not press them. And a picture that
// stands for "nothing here" has a name, but nothing says that it is a picture.
export function nameAsTheyRead() {
  for (const empty of document.querySelectorAll("div.empty[aria-label]:not([role])")) empty.setAttribute("role", "img");
  for (const button of document.querySelectorAll("button[aria-label]")) {
    const text = button.textContent.replace(/\s+/g, " ").trim();
    const name = button.getAttribute("aria-label");
    if (/[\p{L}\p{N}]/u.test(text) && !name.toLowerCase().includes(text.toLowerCase())) {
      button.setAttribute("aria-label", `${text}: ${name.replace(/^.*: /, "")}`);
    }
  }
}

// Voices are recorded as they are: the browser's clean-up for calls changes them.
export function recordUntouched() {
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
