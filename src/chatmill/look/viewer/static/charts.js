// Plots as SVG, each with the numbers behind it as a table.

import { h, s } from "./dom.js";
import { compact, count, percent } from "./format.js";

const WIDTH = 560;
const HEIGHT = 190;
const LEFT = 44;
const BOTTOM = 26;

function ticks(top) {
  const step = 10 ** Math.floor(Math.log10(top || 1));
  const nice = [0.2, 0.5, 1, 2, 5].map((f) => f * step).find((f) => top / f <= 4) || step;
  const found = [];
  for (let at = nice; at <= top; at += nice) if (Number.isInteger(at)) found.push(at);
  return found.length ? found : [top];
}

export function dataTable(head, rows) {
  return h("details", {}, h("summary", {}, "The numbers"),
    h("div", { class: "wide" }, h("table", {},
      h("thead", {}, h("tr", {}, head.map((name, i) => h("th", { class: i ? "n" : "", scope: "col" }, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => h("td", { class: i ? "n" : "" }, cell))))))));
}

// Bars of bins that lie side by side; `marks` are [value, label] drawn as dashed lines.
export function histogram(bins, { label, unit, marks = [] }) {
  const share = unit === "percent";
  const counts = bins.map((bin) => bin.count);
  const edges = [...bins.map((bin) => bin.low), bins.at(-1)?.high ?? 1];
  const axis = share ? (n) => `${Math.round(100 * n)}%` : compact;
  const last = (edge) => axis(share ? edge : edge - 1); // of the values below an edge
  const top = Math.max(...counts, 1);
  const inner = WIDTH - LEFT - 6;
  const step = inner / Math.max(counts.length, 1);
  const base = HEIGHT - BOTTOM;
  const scale = (n) => (n / top) * (base - 22);
  const name = (i) => (!share && edges[i + 1] - edges[i] === 1 ? axis(edges[i]) : `${axis(edges[i])} to ${last(edges[i + 1])}`);
  const x = (value) => {
    const found = edges.findIndex((edge, k) => value < edges[k + 1]);
    const i = found < 0 ? counts.length - 1 : found;
    return LEFT + step * (i + Math.min(1, (value - edges[i]) / (edges[i + 1] - edges[i])));
  };
  const every = Math.max(1, Math.ceil(counts.length / 7));
  const placed = [];
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    ticks(top).map((tick) => [
      s("line", { class: "grid", x1: LEFT, x2: WIDTH - 6, y1: base - scale(tick), y2: base - scale(tick) }),
      s("text", { x: LEFT - 6, y: base - scale(tick) + 4, "text-anchor": "end" }, compact(tick)),
    ]),
    counts.map((n, i) => s("rect", {
      class: "col",
      x: LEFT + i * step + 0.6,
      width: Math.max(step - 1.2, 0.8),
      y: base - scale(n),
      height: n ? Math.max(scale(n), 1) : 0
    },
      s("title", {}, `${name(i)}: ${count(n)}`))),
    s("line", { class: "axis", x1: LEFT, x2: WIDTH - 6, y1: base, y2: base }),
    counts.map((n, i) => (i % every === 0 && i < counts.length - 1 - every / 2) || i === counts.length - 1
      ? s("text", {
        x: i === counts.length - 1 ? WIDTH - 6 : LEFT + i * step,
        y: HEIGHT - 9,
        "text-anchor": i === counts.length - 1 ? "end" : "middle"
      },
        i === counts.length - 1 ? last(edges[i + 1]) : axis(edges[i])) : null),
    marks.map(([value, text]) => {
      const at = x(value);
      const row = placed.some((other) => Math.abs(other - at) < 76) ? 22 : 10;
      placed.push(at);
      return [s("line", { class: "line", x1: at, x2: at, y1: row + 3, y2: base }),
        s("text",
          { class: "strong", x: Math.min(Math.max(at, LEFT + 30), WIDTH - 40), y: row, "text-anchor": "middle" },
          text
        )];
    }));
  return h("div", {},
    svg,
    dataTable([unit, "count"], counts.map((n, i) => [name(i), count(n)]))
  );
}

// Rows of [name, tokens, trained]: a bar as long as the tokens, the trained part of it filled.
export function shares(rows, { what = "tokens" } = {}) {
  const most = Math.max(...rows.map((row) => row.tokens), 1);
  return h("div", {},
    h("div", { class: "shares" }, rows.map((row) => [
      h("div", { class: "name" }, row.link ? h("a", { href: row.link }, row.name) : row.name),
      h("div", {
        class: "track",
        role: "img",
        "aria-label": `${row.name}: ${count(row.trained ?? 0)} of ${count(row.tokens)} ${what} are trained`
      },
        h("span", { class: "t", style: { width: `${(100 * (row.trained ?? 0)) / most}%` } }),
        h("span", { class: "c", style: { width: `${(100 * (row.tokens - (row.trained ?? 0))) / most}%` } })),
      h("div", { class: "figure" },
        row.trained === null ? "…" : h("b", {}, percent(row.trained, row.tokens)),
        ` of ${compact(row.tokens)}`
      ),
    ])),
    h("ul", { class: "legend" },
      h("li", {}, h("i", { class: "trained" }), "trained"),
      h("li", {}, h("i", { class: "context" }), "context, not trained")
    ),
    dataTable(
      ["", "tokens", "trained", "share"],
      rows.map(
        (row) => [
          row.name,
          count(row.tokens),
          row.trained === null ? "…" : count(row.trained),
          row.trained === null ? "…" : percent(row.trained, row.tokens)
        ]
      )
    ));
}

// One bar from what went in to what became of it: [[class, name, tokens], ...].
export function flow(parts, total) {
  const there = parts.filter(([, , n]) => n > 0);
  const all = there.reduce((sum, [, , n]) => sum + n, 0) || 1;
  return h("div", {},
    h("div", {
      class: "flow",
      role: "img",
      "aria-label": there.map(([, name, n]) => `${name} ${count(n)}`).join(", ")
    },
      there.map(
        ([kind, name, n]) => h("span",
          {
            class: kind,
            style: { flex: `${n / all} 1 0` },
            title: `${name}: ${count(n)} tokens, ${percent(n, total)}`
          },
          n / all > 0.09 ? `${name} ${percent(n, total)}` : ""
        )
      )),
    h("ul", { class: "legend" },
      there.map(
        ([kind, name, n]) => h("li", {}, h("i", { class: kind }), `${name} `, h("b", { class: "num" }, count(n)))
      )
    ));
}
