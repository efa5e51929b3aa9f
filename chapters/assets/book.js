/* Stepped pictures and live cells. Without this script both still show and teach. */

const assets = new URL(".", document.currentScript.src);

function add(parent, tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  return parent.appendChild(made);
}

/* ---- stepped pictures: buttons, arrow keys, "2/5" ---- */

function walk(steps) {
  const frames = [...steps.children];
  const bar = add(steps, "div", "", { class: "bar" });
  const back = add(bar, "button", "Back", { type: "button" });
  const next = add(bar, "button", "Next", { type: "button" });
  const place = add(bar, "span", "", { role: "status" });
  let at = 0;
  function show(to) {
    at = Math.min(Math.max(to, 0), frames.length - 1);
    frames.forEach((frame, i) => (frame.hidden = i !== at));
    place.textContent = `${at + 1}/${frames.length}`;
  }
  const keys = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };
  steps.tabIndex = 0;
  steps.setAttribute("role", "group");
  steps.setAttribute("aria-label", "Steps of a picture: the arrow keys walk through");
  steps.addEventListener("keydown", (event) => {
    if (!(event.key in keys)) return;
    event.preventDefault();
    show(at + keys[event.key]);
  });
  back.onclick = () => show(at - 1);
  next.onclick = () => show(at + 1);
  show(0);
}

/* ---- live cells: an editor, and Python in a worker of the page ---- */

let worker = null; // one Python for all cells of a page; each run has its own names
let turn = null; // the cell that runs

function enliven(cell) {
  const [code, stored] = [cell.querySelector("code"), [...cell.children].slice(1)];
  const written = code.innerHTML;
  const bar = add(cell, "div", "", { class: "bar" });
  const run = add(bar, "button", "Run", { type: "button" });
  const reset = add(bar, "button", "Reset", { type: "button" });
  const note = add(bar, "span", "", { role: "status" });
  const printed = add(cell, "div", "", { class: "output", "aria-live": "polite" });
  const size = Number(cell.dataset.megabytes);
  function clear(idle = false) {
    printed.replaceChildren();
    for (const part of stored) part.hidden = !idle;
    note.textContent = "";
  }
  function hear({ kind, text }) {
    if (kind === "html") add(printed, "div").innerHTML = text;
    else if (kind === "end") end();
    else if (kind === "begin") note.textContent = "runs …";
    else write(printed, kind, text);
  }
  function end(words = "") {
    turn = null;
    run.textContent = "Run";
    note.textContent = words;
  }
  function stop(words = "") {
    worker.terminate();
    worker = null;
    end(words);
  }
  function start() {
    if (turn === cell) return stop("stopped");
    if (turn) return (note.textContent = "another cell runs: stop it first");
    clear();
    turn = cell;
    run.textContent = "Stop";
    note.textContent = worker ? "runs …" : `loads Python, ${size} MB …`;
    worker ??= new Worker(new URL("live.js", assets), { type: "module" });
    worker.onmessage = (event) => hear(event.data);
    worker.onerror = () => stop("Python did not load: reload the page");
    worker.postMessage(code.innerText);
  }
  run.onclick = start;
  reset.onclick = () => {
    if (turn === cell) stop();
    code.innerHTML = written;
    clear(true);
  };
  const missing = !size
    ? "needs Python for the browser: `python run.py run` fetches it, with a network"
    : location.protocol === "file:" && "needs a server: `python run.py site`";
  run.disabled = reset.disabled = Boolean(missing);
  note.textContent = missing || `the first run loads Python, ${size} MB`;
  if (!missing) edit(code, start);
}

function write(printed, kind, text) {
  const last = printed.lastElementChild;
  if (last?.className === kind) last.firstChild.append("\n" + text);
  else add(add(printed, "pre", "", { class: kind }), "code", text);
}

function edit(code, start) {
  let leave = false; // Escape, then Tab: out of the editor
  code.contentEditable = "plaintext-only";
  code.spellcheck = false;
  code.tabIndex = 0;
  code.setAttribute("role", "textbox");
  code.setAttribute("aria-multiline", "true");
  code.setAttribute("aria-label", "Code. Ctrl+Enter runs; Escape, then Tab leaves");
  code.addEventListener("keydown", (event) => {
    const tab = event.key === "Tab" && !event.shiftKey && !leave;
    leave = event.key === "Escape" || (leave && event.key === "Shift");
    if (tab) document.execCommand("insertText", false, "    ");
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start();
    else return;
    event.preventDefault();
  });
}

document.querySelectorAll(".steps").forEach(walk);
document.querySelectorAll(".live").forEach(enliven);
