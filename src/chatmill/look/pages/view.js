// What pages do besides being read: keys, details of tokens, and rows of lists that can be stepped through.
// Every other page, filter and choice is an address that the server answers.

const all = (query) => [...document.querySelectorAll(query)];
const byId = (id) => document.getElementById(id);
const make = (name, text, kind) => {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text; // text only: nothing of a dataset is parsed as HTML
  if (kind) node.className = kind;
  return node;
};

// --- tokens

const tokens = all(".runs .token[data-i]");
const tip = byId("tip");
let chosen = -1;

function details(token) {
  const run = token.closest(".run").dataset;
  const before = [...token.parentElement.querySelectorAll(".token")];
  const ids = (node) => node.dataset.i.split(" ");
  let position = Number(run.start);
  for (const other of before.slice(0, before.indexOf(token))) position += ids(other).length;
  const text = [...token.childNodes].map((node) => node.textContent).join("").replaceAll("⏎\n", "\n").replaceAll("⇥\t", "\t");
  const plain = [...new TextEncoder().encode(text)].map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  const known = !token.matches(".unknown, .id");
  const many = ids(token).length > 1;
  return [
    [many ? "ids" : "id", ids(token).join(", ")],
    ["bytes", known ? token.dataset.b ?? plain : "–"],
    run.kind !== "none" && [run.kind.startsWith("span-") ? "span" : "kind", run.kind.replace("span-", "")],
    run.weight && ["weight", run.weight + (run.stored ? ` (stored ${run.stored})` : "")],
    ["position", `${(position - Number(run.document)).toLocaleString("en")} in its document, ${position.toLocaleString("en")} in all`],
    token.matches(".unknown") && ["note", "not in the vocabulary"],
    token.matches(".raw") && ["note", "bytes that are no text by themselves"],
    many && ["note", "these tokens share a character"],
  ].filter(Boolean);
}

function showTip(token) {
  const list = make("dl");
  for (const [name, value] of details(token)) list.append(make("dt", name), make("dd", value));
  tip.replaceChildren(make("div", token.textContent.slice(0, 200).replaceAll(" ", "␣"), "what"), list);
  tip.hidden = false;
  const box = token.getClientRects()[0] ?? token.getBoundingClientRect();
  const own = tip.getBoundingClientRect();
  const below = box.bottom + 8;
  tip.style.left = `${Math.min(Math.max(8, box.left), innerWidth - own.width - 8)}px`;
  tip.style.top = `${below + own.height > innerHeight ? Math.max(8, box.top - own.height - 8) : below}px`;
}

function leave() {
  tokens[chosen]?.classList.remove("here");
  chosen = -1;
  tip.hidden = true;
}

function select(index) {
  if (!tokens.length) return;
  leave();
  chosen = Math.min(Math.max(index, 0), tokens.length - 1);
  const token = tokens[chosen];
  token.classList.add("here");
  const box = token.getBoundingClientRect();
  if (box.top < 70 || box.bottom > innerHeight - 140) token.scrollIntoView({ block: "center", behavior: "instant" });
  showTip(token);
  byId("live").textContent = `${token.textContent}: ${details(token).map((row) => row.join(" ")).join(", ")}`;
}

const runs = byId("runs");
if (runs && tokens.length) {
  runs.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token[data-i]");
    if (token && event.pointerType !== "touch") { leave(); showTip(token); }
  });
  runs.addEventListener("pointerleave", () => { if (chosen < 0) tip.hidden = true; });
  runs.addEventListener("click", (event) => {
    const token = event.target.closest(".token[data-i]");
    if (token) select(tokens.indexOf(token));
  });
}

// --- lists

let row = -1;

function move(step) {
  const rows = all("#list tbody tr");
  if (!rows.length) return false;
  row = Math.min(Math.max(row + step, 0), rows.length - 1);
  rows.forEach((one, i) => one.setAttribute("aria-selected", i === row ? "true" : "false"));
  rows[row].querySelector("a").focus({ preventScroll: true });
  rows[row].scrollIntoView({ block: "nearest" });
  return true;
}

byId("list")?.addEventListener("click", (event) => {
  if (!event.target.closest("a")) event.target.closest("tbody tr")?.querySelector("a").click();
});
for (const field of all("select[data-submit]")) field.addEventListener("change", () => field.form.submit());

// --- keys

const KEYS = {
  o: "overview", b: "browse", r: "a random item", s: "next split", "/": "search", j: "next: row, item", k: "the one before",
  n: "next page, later tokens", p: "page before, earlier tokens", f: "first trained token", c: "the other colouring", w: "choose a policy",
  "→ ←": "next token, token before", Esc: "close; stop a search", "?": "these keys",
};

function help() {
  const box = byId("keys");
  if (box.open) { box.close(); return; }
  const list = make("dl");
  for (const [key, name] of Object.entries(KEYS)) {
    const line = make("div");
    line.append(make("dt"), make("dd", name));
    for (const one of key.split(" ")) line.firstChild.append(make("kbd", one), " ");
    list.append(line);
  }
  const close = make("button", "Close", "primary");
  close.addEventListener("click", () => box.close());
  const title = make("h2", "Keys");
  title.id = "keys-title";
  box.replaceChildren(title, list, make("p", "Hover, tap or step over a token to see its id, bytes, kind, weight and position.", "quiet small"), close);
  box.showModal();
}

byId("help").addEventListener("click", help);

const STEPS = {
  ArrowRight: () => tokens.length && (select(chosen + 1), true), ArrowLeft: () => tokens.length && (select(chosen - 1), true),
  ArrowDown: () => move(1), ArrowUp: () => move(-1), Escape: () => (leave(), stop(), true), j: () => byId("list") && move(1), k: () => byId("list") && move(-1),
};

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  const typing = event.target.closest("input, select, textarea");
  if (typing) {
    if (event.key === "Escape") typing.blur();
    return;
  }
  let done = STEPS[event.key]?.();
  const target = done ? null : document.querySelector(`[data-key="${CSS.escape(event.key)}"]`);
  if (target) {
    if (target.matches("input, select")) target.focus();
    else target.click();
    done = true;
  }
  if (done) event.preventDefault();
});
