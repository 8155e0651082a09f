// A packed row as a map: every document a coloured stretch, what is trained a bar inside it, padding hatched.

import { h, s } from "./dom.js";
import { count, oneLine, percent, plural } from "./format.js";

const WIDTH = 640;
const LINE = 21;
const GAP = 5;

// Cuts [first, first + tokens) at the line ends of the map.
function* pieces(first, tokens, perLine) {
  let at = first;
  const end = first + tokens;
  while (at < end) {
    const line = Math.floor(at / perLine);
    const upto = Math.min(end, (line + 1) * perLine);
    yield { line, x: at - line * perLine, n: upto - at };
    at = upto;
  }
}

export function blockMap(shown, onPick) {
  const total = shown.capacity ?? shown.tokens;
  const lines = Math.min(Math.max(4, Math.ceil(Math.sqrt(total / 24))), 24);
  const perLine = Math.ceil(total / lines);
  const rows = Math.ceil(total / perLine);
  const scale = WIDTH / perLine;
  const height = rows * (LINE + GAP) - GAP;
  const rect = (piece, attributes, ...children) => s("rect",
    {
      x: piece.x * scale,
      y: piece.line * (LINE + GAP),
      width: Math.max(piece.n * scale, 0.5),
      height: LINE,
      ...attributes
    },
    ...children
  );
  const shapes = [];
  const entries = [];
  const light = (index, on) => {
    for (const one of shapes[index] ?? []) one.classList.toggle("on", on);
    entries[index]?.classList.toggle("on", on);
  };
  const labels = [];
  shown.documents.forEach((about, index) => {
    const title = `document ${index}: ${plural(about.tokens, "token")}, ${count(about.trained)} trained`;
    const parts = [...pieces(about.start, about.tokens, perLine)];
    shapes[index] = parts.map(
      (piece) => rect(piece,
        {
          class: `doc doc${index % 6}`,
          onclick: () => onPick(about.start),
          onpointerenter: () => light(index, true),
          onpointerleave: () => light(index, false)
        },
        s("title", {}, title)
      )
    );
    const widest = parts.reduce((best, piece) => (piece.n > best.n ? piece : best), parts[0] ?? { n: 0 });
    if (widest.n * scale > 26) labels.push(
      s("text", { x: widest.x * scale + 4, y: widest.line * (LINE + GAP) + 11 }, String(index))
    );
  });
  const bars = shown.map.flatMap(
    ([first, tokens]) => [...pieces(first, tokens, perLine)].map(
      (piece) => rect(piece, { class: "on-target", y: piece.line * (LINE + GAP) + LINE - 6, height: 6 })
    )
  );
  const padding = [...pieces(shown.tokens, total - shown.tokens, perLine)].map(
    (piece) => rect(piece, { class: "pad" }, s("title", {}, `padding: ${plural(total - shown.tokens, "position")}`))
  );
  const svg = s("svg", {
    viewBox: `0 0 ${WIDTH} ${height}`,
    role: "img",
    "aria-label": `Map of the row: ${plural(shown.documents.length, "document")}, padding ${count(total - shown.tokens)}`
  },
    s("defs", {},
      s("pattern",
        { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        s("line", { class: "hatch-line", x1: 0, y1: 0, x2: 0, y2: 6 })
      )
    ),
    shapes, bars, padding, labels);
  const list = h("div", {
    class: "documents",
    tabindex: 0,
    role: "region",
    "aria-label": "Documents of the row"
  }, h("table", {},
    h("thead", {},
      h("tr", {},
        ["document", "tokens", "trained"].map((name, i) => h("th", { class: i ? "n" : "", scope: "col" }, name))
      )
    ),
    h("tbody", {}, shown.documents.map((about, index) => {
      entries[index] = h("tr", {
        onclick: () => onPick(about.start),
        onpointerenter: () => light(index, true),
        onpointerleave: () => light(index, false)
      },
        h("td", {},
          h("span", { class: `chip doc${index % 6}` }),
          h("a", { href: "#", onclick: (event) => { event.preventDefault(); } }, String(index)),
          about.text && h("span", { class: "quiet small" }, ` ${oneLine(about.text)}`)
        ),
        h("td", { class: "n" }, count(about.tokens)), h("td", { class: "n" }, percent(about.trained, about.tokens)));
      return entries[index];
    }))));
  return h("section", { class: "card map", id: "map" }, h("h2", {}, "Map of the row"),
    h("p", { class: "quiet small" },
      `${count(perLine)} positions a line, read like text. Choose a document to go to its tokens.`
    ),
    h("div", { class: "columns" }, h("div", {}, svg,
      h("ul", { class: "legend" },
        h("li", {}, h("i", { class: "trained" }), "bar below: trained"),
        h("li", {}, "number: document, in the order of the row"),
        shown.padding > 0 && h("li", {}, h("i", { class: "padding" }), `padding (${count(shown.padding)})`)
      )), list));
}
