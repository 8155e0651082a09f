// One item: its runs token by token, coloured in four ways, with details of each token and policies to try.

import { get } from "./api.js";
import { blockMap } from "./blockmap.js";
import { byId, h, replace, say } from "./dom.js";
import { count, hex, oneLine, percent, plural, spelled, visible } from "./format.js";
import { address, dataset, go, note, remembered, split, splitPath } from "./state.js";

export const COLOURS = [["trained", "Trained"], ["kind", "Kind"], ["document", "Document"], ["position", "Position"]];
const WINDOW = 2048;
const MARK_EVERY = 32;
const LONG_PROMPT = 300;

export async function item(main, route, signal) {
  const page = new Item(main, route, signal);
  await page.load();
  return page;
}

class Item {
  constructor(main, route, signal) {
    Object.assign(this, { main, route, signal, at: -1, tokens: [] });
    this.data = dataset(route.dataset);
    this.part = split(route.dataset, route.split);
    this.number = Number(route.rest[0]) || 0;
    const at = Number(route.params.at);
    this.first = Number(route.params.first) || (at >= WINDOW ? Math.max(0, at - 64) : 0);
    this.colour = route.params.colour || remembered.get("colour") || "trained";
    if (!COLOURS.some(([name]) => name === this.colour)) this.colour = "trained";
  }

  async load() {
    const { policy } = this.route.params;
    this.shown = await get(
      `${splitPath(this.route.dataset, this.route.split)}/item/${this.number}`,
      { first: this.first || "", count: WINDOW, policy },
      this.signal
    );
    this.draw();
    const { at, hit } = this.route.params;
    if (at !== undefined) this.markHit(Number(at), Number(hit) || 1);
  }

  link(number) {
    const { colour, policy } = this.route.params;
    return address(
      {
        page: "item",
        dataset: this.route.dataset,
        split: this.route.split,
        rest: [number],
        params: { colour, policy }
      }
    );
  }

  draw() {
    const { shown, data, part } = this;
    const name = `${data.item[0].toUpperCase()}${data.item.slice(1)} ${count(shown.number)}`;
    const tried = shown.policy !== null;
    const arrow = (text, label, to) => h(to === null ? "button" : "a",
      to === null ? { disabled: true, type: "button", "aria-label": label } : {
        class: "button",
        href: this.link(to),
        "aria-label": label,
        title: label
      },
      text
    );
    this.body = h("section", { class: "card runs", id: "runs" });
    replace(this.main,
      h("div", { class: "title" }, h("h1", {}, name), h("span", { class: "badge" }, part.name),
        shown.record_id && h("code", { id: "record-id" },
          oneLine(shown.record_id)
        ), shown.source && h("span", { class: "badge" }, shown.source),
        h("div", { class: "moves" },
          arrow("‹ Previous", "Previous item (k)", shown.number > 0 ? shown.number - 1 : null),
          arrow("Next ›", "Next item (j)", shown.number + 1 < shown.items ? shown.number + 1 : null)
        )),
      h("div", { class: "summary", id: "summary" },
        h("span", {}, h("b", { id: "n-tokens" }, count(shown.tokens)), " tokens"),
        h("span", {},
          h("b", { id: "n-trained" }, count(shown.trained)),
          ` trained (${percent(shown.trained, shown.tokens)})`
        ),
        tried && h("span", { id: "n-stored" },
          `as stored ${count(shown.trained_stored)} (${percent(shown.trained_stored, shown.tokens)})`
        ),
        shown.documents.length > 1 && h("span", {},
          h("b", { id: "n-documents" }, count(shown.documents.length)),
          " documents"
        ),
        shown.capacity !== null && h("span", {},
          h("b", {}, percent(shown.tokens, shown.capacity)),
          ` of ${count(shown.capacity)} filled`
        ),
        shown.turns !== null && h("span", {}, h("b", {}, count(shown.turns)), shown.turns === 1 ? " turn" : " turns"),
        h("span", { class: "small" }, `stored: ${shown.features.join(", ")}`)),
      shown.problem && h("p", { class: "error" }, shown.problem),
      data.tokenizer_problem && h("p", { class: "note" }, data.tokenizer_problem),
      this.controls(),
      shown.map && blockMap(shown, (position) => this.goTo(position)),
      this.turns(),
      this.windows(), this.body, shown.window.last < shown.tokens && this.windows());
    this.drawRuns();
    say(`${name}: ${count(shown.tokens)} tokens, ${count(shown.trained)} trained`);
  }

  controls() {
    const { part, shown } = this;
    this.colourButtons = COLOURS.map(
      ([value, name], i) => h("button",
        {
          type: "button",
          "aria-pressed": value === this.colour ? "true" : "false",
          title: `Colour by ${name.toLowerCase()} (${i + 1})`,
          data: { colour: value },
          onclick: () => this.setColour(value)
        },
        value === "kind" && part.has_spans ? "Span" : name
      )
    );
    const policy = part.policies.length > 0 && h("label", { class: "field" }, "what would be trained under",
      h("select", { id: "policy", onchange: (event) => this.setPolicy(event.target.value) },
        h("option", { value: "" },
          part.has_weights ? "the weights as stored" : "every token, as stored"
        ), part.policies.map(
          (name) => h("option", { value: name, selected: name === shown.policy }, `policy ${name}`)
        )));
    const jump = h("button",
      {
        type: "button",
        id: "first-trained",
        disabled: shown.first_trained === null,
        title: "Go to the first trained token (f)",
        onclick: () => this.firstTrained()
      },
      shown.first_trained === null ? "Nothing is trained" : "First trained token"
    );
    this.legend = h("ul", { class: "legend", id: "legend" });
    return h("div", {}, h("div", { class: "controls" },
      h("div", { class: "field-like" },
        h("div", { class: "choice", role: "group", "aria-label": "Colour by" }, this.colourButtons)
      ), policy, jump), this.legend);
  }

  firstTrained() {
    if (this.shown.first_trained !== null) this.goTo(this.shown.first_trained);
  }

  // The messages of a long chat, each a way to its tokens.
  turns() {
    const { list } = this.shown;
    if (!list.length) return null;
    return h("details", { class: "card turns", id: "turns", open: innerWidth > 640 },
      h("summary", {}, plural(list.length, "message")),
      h("ol", {}, list.map((one) => h("li", {},
        h("button", { type: "button", data: { start: one.start }, onclick: () => this.goTo(one.start) },
          h("b", { class: `role ${one.role}` }, one.role === "none" ? "document" : one.role),
          h("span", { class: "words", dir: "auto" }, oneLine(one.text)),
          h("small", {}, `${count(one.tokens)} tok`, one.trained ? `, ${count(one.trained)} trained` : "")
        )
      ))));
  }

  setColour(value) {
    this.colour = value;
    remembered.set("colour", value);
    note({ colour: value });
    this.route.params.colour = value;
    for (const button of this.colourButtons) button.setAttribute(
      "aria-pressed",
      button.dataset.colour === value ? "true" : "false"
    );
    this.drawRuns();
    say(`Coloured by ${value}`);
  }

  async setPolicy(value) {
    note({ policy: value });
    this.route.params.policy = value;
    await this.load();
    byId("policy").focus();
  }

  drawLegend() {
    const sign = (kind, text, about) => h("li", {},
      h("span", { class: `swatch ${kind}` }, text),
      about && ` ${about}`
    );
    const common = [
      sign("control", "‹control›", "control token"),
      this.shown.policy !== null && [
        sign("gained", "+", "trained now, not as stored"),
        sign("lost", "−", "trained as stored, not now")
      ]
    ];
    const roles = [...new Set(Object.values(this.shown.messages).map((one) => one.role ?? "none"))];
    replace(this.legend, {
      trained: [sign("trained", "underlined", "trained"), sign("", "plain", "context")],
      kind: this.part.has_spans ? ["context", "analysis", "final"].map(
        (name) => sign(`span-${name}`, name)
      ) : roles.map(
        (role) => sign(role, role === "none" ? "document" : role)
      ),
      document: [h("li", {}, "each document has its colour and its number")],
      position: [
        sign("first", "0", "first position of a document"),
        sign("last", "→", "last"),
        h("li", {}, `small numbers count positions, every ${MARK_EVERY}`)
      ],
    }[this.colour], common);
  }

  windows() {
    const { first, last } = this.shown.window;
    const all = this.shown.tokens;
    if (first === 0 && last >= all) return null;
    const move = (text, to, disabled) => h("button",
      { type: "button", disabled, onclick: () => this.goTo(to, true) },
      text
    );
    const box = h("input",
      { type: "number", min: 0, max: all - 1, placeholder: "token", "aria-label": "Token to go to" }
    );
    return h("div", { class: "pager" }, h("span", {},
      "tokens ",
      h("b", { class: "num window" }, `${count(first)}–${count(last - 1)}`),
      ` of ${count(all)}`
    ),
      move("‹ earlier", Math.max(0, first - WINDOW), first === 0), move("later ›", last, last >= all),
      h("form",
        {
          onsubmit: (event) => {
            event.preventDefault();
            if (box.value !== "") this.goTo(Math.min(Number(box.value), all - 1));
          }
        },
        box,
        " ",
        h("button", { type: "submit" }, "Go to token")
      ));
  }

  // Show the window that begins at a token, or scroll to the token where it is shown already.
  async goTo(position, newWindow = false) {
    const { first, last } = this.shown.window;
    if (newWindow || position < first || position >= last) {
      this.first = position;
      note({ first: position || "", at: "", hit: "" });
      this.route.params.at = undefined;
      await this.load();
    }
    const index = this.tokens.findIndex((token) => token.position + token.ids.length > position);
    if (index >= 0 && !newWindow) this.select(index);
    else this.body.scrollIntoView({ block: "start" });
  }

  drawRuns() {
    const { shown } = this;
    this.drawLegend();
    this.tokens = [];
    this.at = -1;
    hideTip();
    this.body.className = `card runs by-${this.colour}`;
    const groups = [];
    let message = null;
    let documentAt = -1;
    let words = null;
    for (const run of shown.runs) {
      if (
        run.document !== documentAt && (shown.documents.length > 1 || shown.capacity !== null)
      ) groups.push(this.divider(run, shown.documents[run.document]));
      if (run.message !== message || run.document !== documentAt) {
        const about = shown.messages[run.message];
        words = h("div", { class: "body", dir: "auto" });
        groups.push(this.messageBox(about, words));
      }
      message = run.message;
      documentAt = run.document;
      words.append(this.run(run));
    }
    if (shown.padding > 0 && shown.window.last >= shown.tokens) groups.push(
      h("div", { class: "divider" }, "padding", h("span", { class: "num" }, plural(shown.padding, "position")))
    );
    replace(this.body, groups.length ? groups : h("p", { class: "quiet pad" }, "No tokens."));
    this.body.onpointerover = (event) => this.over(event);
    this.body.onpointerleave = () => { if (this.at < 0) hideTip(); };
    this.body.onclick = (event) => {
      const node = event.target.closest(".token");
      if (node) this.select(Number(node.dataset.n));
    };
  }

  divider(run, about) {
    const named = about.number === null ? `document ${run.document}` : `document ${run.document} · number ${count(about.number)}`;
    return h("div", { class: "divider", data: { document: run.document } },
      named,
      h("span", { class: "num" }, `${plural(about.tokens, "token")}, ${count(about.trained)} trained`),
      run.start > about.start && h("span", {}, "continued")
    );
  }

  messageBox(about, words) {
    const role = about?.role ?? "none";
    const label = about?.role === null || about === undefined ? "tokens" : role === "none" ? "document" : role;
    const box = h("article", { class: `message${about?.trained ? " some-trained" : ""}`, "aria-label": label },
      h("div", { class: `role ${role}` },
        label,
        h("small", {}, `${count(about?.tokens ?? 0)} tok`, about?.trained ? `, ${count(about.trained)} trained` : "")
      ), words);
    const long = (role === "system" || role === "developer") && about.tokens > LONG_PROMPT && !about.trained;
    if (long && !this.unfolded) {
      box.classList.add("folded");
      box.append(h("button",
        { type: "button", class: "unfold", onclick: () => this.unfold() },
        `Show all ${count(about.tokens)} tokens`
      ));
    }
    return box;
  }

  // Show long prompts whole, here and in the next window.
  unfold() {
    this.unfolded = true;
    for (const box of this.body.querySelectorAll(".folded")) {
      box.classList.remove("folded");
      box.querySelector(".unfold").remove();
    }
  }

  run(run) {
    const { shown, colour } = this;
    const [role, part] = (run.kind ?? "none.tokens").split(".");
    const trained = run.weight > 0;
    const was = run.stored > 0;
    const change = shown.policy === null || trained === was ? "" : trained ? "gained" : "lost";
    const node = h("span",
      {
        class: [
          "run",
          role,
          part ?? "",
          run.span && `span-${run.span}`,
          trained && "trained",
          change,
          `doc${run.document % 6}`
        ].filter(Boolean).join(" "),
        data: { kind: run.kind ?? "", weight: run.weight, start: run.start }
      }
    );
    if (colour === "kind" && run.kind) node.append(h("span", { class: "tag" }, (part ?? role).replace("_", " ")));
    if (colour === "kind" && run.span) node.append(h("span", { class: "tag" }, run.span));
    if (trained && run.weight !== 1) node.append(h("span", { class: "weight" }, `×${+run.weight.toPrecision(3)}`));
    const start = shown.documents[run.document]?.start ?? 0;
    const length = shown.documents[run.document]?.tokens ?? 1;
    let position = run.start;
    for (const piece of run.pieces) {
      const inDocument = position - start;
      if (
        colour === "position" && (inDocument % MARK_EVERY === 0 || inDocument === 0)
      ) node.append(h("span", { class: "place" }, count(inDocument)));
      const token = h("span", { class: `token ${piece.f ?? ""}`, data: { n: this.tokens.length } });
      if (colour === "position") token.style.setProperty("--at", ((100 * inDocument) / length).toFixed(1));
      words(token, piece);
      this.tokens.push({ node: token, piece, run, position, inDocument, ids: piece.i });
      node.append(token, piece.f === "id" ? " " : "");
      position += piece.i.length;
    }
    return node;
  }

  over(event) {
    const node = event.target.closest(".token");
    if (node && event.pointerType !== "touch") {
      this.unselect();
      showTip(this.tokens[Number(node.dataset.n)], node);
    }
  }

  unselect() {
    this.tokens[this.at]?.node.classList.remove("here");
    this.at = -1;
  }

  select(index) {
    if (!this.tokens.length) return;
    this.unselect();
    this.at = Math.min(Math.max(index, 0), this.tokens.length - 1);
    const token = this.tokens[this.at];
    if (this.at > 0 && token.node.closest(".folded")) this.unfold();
    token.node.classList.add("here");
    const box = token.node.getBoundingClientRect();
    if (
      box.top < 70 || box.bottom > innerHeight - 140
    ) token.node.scrollIntoView({ block: "center", behavior: "instant" });
    showTip(token, token.node);
    say(tipText(token));
  }

  markHit(at, tokens) {
    for (const token of this.tokens) {
      if (
        token.position + token.ids.length > at && token.position < at + tokens
      ) token.node.replaceChildren(h("mark", {}, ...token.node.childNodes));
    }
    const first = this.tokens.find((token) => token.position + token.ids.length > at);
    if (first?.node.closest(".folded")) this.unfold();
    first?.node.scrollIntoView({ block: "center", behavior: "instant" });
  }

  keys() {
    const colours = Object.fromEntries(COLOURS.map(([value], i) => [String(i + 1), () => this.setColour(value)]));
    const open = (number) => number >= 0 && number < this.shown.items && (location.hash = this.link(number));
    return {
      ...colours,
      c: () => this.setColour(COLOURS[(COLOURS.findIndex(([v]) => v === this.colour) + 1) % COLOURS.length][0]),
      j: () => open(this.shown.number + 1), k: () => open(this.shown.number - 1),
      ArrowRight: () => this.select(this.at + 1), ArrowLeft: () => this.select(this.at < 0 ? 0 : this.at - 1),
      n: () => this.shown.window.last < this.shown.tokens && this.goTo(this.shown.window.last, true),
      p: () => this.shown.window.first > 0 && this.goTo(Math.max(0, this.shown.window.first - WINDOW), true),
      f: () => this.firstTrained(),
      w: () => byId("policy")?.focus(),
      Escape: () => { this.unselect(); hideTip(); },
      b: () => go({ page: "browse", dataset: this.route.dataset, split: this.route.split, params: {} }),
    };
  }
}

// The text of a token: line ends get a sign and keep their effect, hidden characters are spelled.
function words(node, piece) {
  if (piece.f === "control") {
    node.textContent = visible(piece.t);
    return;
  }
  for (const part of piece.t.split(/(\n|[\u0000-\u0008\u000b-\u001f\u007f])/)) {
    if (part === "\n") node.append(h("span", { class: "newline", "aria-hidden": "true" }, "⏎"), "\n");
    else if (
      part.length === 1 && (part < " " && part !== "\t" || part === "\u007f")
    ) node.append(h("span", { class: "hidden" }, spelled(part)));
    else if (part) node.append(visible(part));
  }
}

function byteText(piece) {
  if (piece.f === "unknown" || piece.f === "id") return "–";
  const pairs = (text) => text.match(/../g)?.join(" ") ?? "";
  return piece.b ? piece.b.map(pairs).join(" | ") : hex(piece.t);
}

function tipRows({ piece, run, position, inDocument }) {
  const many = piece.i.length > 1;
  return [
    [many ? "ids" : "id", piece.i.map(count).join(", ").replaceAll(",", piece.i.length > 1 ? "," : "")],
    ["bytes", byteText(piece)],
    run.kind !== undefined && ["kind", run.kind],
    run.span !== undefined && ["span", run.span],
    [
      "weight",
      `${+run.weight.toPrecision(6)}${run.weight !== run.stored ? ` (stored ${+run.stored.toPrecision(6)})` : ""}`
    ],
    ["position", `${count(inDocument)} in its document, ${count(position)} in all`],
    piece.f === "unknown" && ["note", "not in the vocabulary"],
    piece.f === "raw" && ["note", "bytes that are no text by themselves"],
    many && ["note", "these tokens share a character"],
  ].filter(Boolean);
}

const tipText = (token) => `${visible(token.piece.t)}: ${tipRows(token).map(([name, value]) => `${name} ${value}`).join(", ")}`;

function showTip(token, node) {
  const tip = byId("tip");
  replace(
    tip,
    h("div", { class: "what" },
      visible(token.piece.t.slice(0, 200)).replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣")
    ),
    h("dl", {}, tipRows(token).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat())
  );
  tip.hidden = false;
  const box = node.getClientRects()[0] ?? node.getBoundingClientRect();
  const own = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), innerWidth - own.width - 8);
  const below = box.bottom + 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${below + own.height > innerHeight ? Math.max(8, box.top - own.height - 8) : below}px`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
