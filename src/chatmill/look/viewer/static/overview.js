// The overview of a split: sums, plots, the ledger of the build, and where the dataset comes from.

import { get } from "./api.js";
import { flow, histogram, shares } from "./charts.js";
import { h, replace, say } from "./dom.js";
import { bytes, compact, count, percent, plural } from "./format.js";
import { address, dataset, split, splitPath } from "./state.js";

const tile = (value, name, title) => h("div", { class: "tile", title }, h("b", {}, value), h("span", {}, name));
const card = (title, about, content, kind = "") => content && h("section", { class: `card ${kind}` },
  h("h2", {}, title),
  about && h("p", { class: "quiet small" }, about),
  content
);

export async function overview(main, route, signal) {
  const data = dataset(route.dataset);
  const part = split(route.dataset, route.split);
  const shown = await get(`${splitPath(route.dataset, route.split)}/overview`, {}, signal);
  draw(main, route, data, part, shown);
  let seen = shown;
  while (!seen.scan.done && !seen.scan.problem && !signal.aborted) {
    await new Promise((wake) => setTimeout(wake, 600));
    if (signal.aborted) return;
    seen = await get(`${splitPath(route.dataset, route.split)}/overview`, {}, signal);
    if (seen.scan.done || seen.scan.problem) {
      draw(main, route, data, part, seen);
      say("All labels are counted.");
    } else {
      main.querySelectorAll("progress.scan").forEach((bar) => { bar.value = seen.scan.share; });
    }
  }
}

function draw(main, route, data, part, o) {
  const one = data.item;
  replace(main,
    h("div", { class: "head" },
      h("h1", {}, data.name),
      h("span", { class: "badge" }, part.name),
      h("span", { class: "badge" }, data.layout),
      data.path !== data.name && h("span", { class: "quiet mono small" }, data.path)
    ),
    data.tokenizer_problem && h("p", { class: "note" }, data.tokenizer_problem),
    o.scan.problem && h("p", { class: "error" }, o.scan.problem),
    !o.scan.done && !o.scan.problem && h("div", { class: "note" },
      "Reading the labels once, to count roles and trained tokens; the rest can be used meanwhile.",
      h("progress", { class: "scan", max: 1, value: o.scan.share, "aria-label": "Labels read" })
    ),
    h("div", { class: "tiles", id: "tiles" },
      tile(count(o.items), `${one}s`),
      data.packed && tile(count(o.documents), "documents"),
      tile(compact(o.tokens), "tokens", `${count(o.tokens)} tokens`),
      tile(
        o.trained === null ? "…" : percent(o.trained, o.tokens),
        "of the tokens trained",
        o.trained === null ? "" : `${count(o.trained)} tokens`
      ),
      o.padding !== null && tile(
        percent(o.tokens, o.tokens + o.padding),
        "of the rows filled",
        `${count(o.padding)} positions of padding`
      ),
      o.shares && tile(count(o.shares.without), `${one}s that train nothing`),
      part.sources.length > 0 && tile(count(part.sources.length), part.sources.length === 1 ? "source" : "sources")),
    h("div", { class: "cards" },
      card("Length", lengthText(data, o.lengths),
        histogram(
          o.lengths.bins,
          {
            label: "Histogram of lengths in tokens",
            unit: "tokens",
            marks: o.items === 0 ? [] : [
              [o.lengths["50%"], `median ${compact(Math.floor(o.lengths["50%"]))}`],
              [o.lengths["95%"], `95% ${compact(Math.floor(o.lengths["95%"]))}`]
            ]
          }
        )),
      card("Who speaks", "Tokens of each role, and how many of them are trained.", o.by_role && shares(o.by_role)),
      card("Spans", "Tokens of the answers, as the distillation loss groups them.", o.by_span && shares(o.by_span)),
      card("What would be trained if …", "Tokens that other policies would train, from the stored kinds.",
        o.policies && policies(o, part)
      ),
      card("Trained share", `How much of each ${one} is trained; on average ${o.shares ? percent(o.shares.mean, 1) : "–"}.`,
        o.shares && part.has_weights && histogram(
          o.shares.bins,
          {
            label: "Histogram of trained shares",
            unit: "percent",
            marks: [[o.shares.mean, `mean ${percent(o.shares.mean, 1)}`]]
          }
        )),
      card("Fill of the rows", o.fill && fillText(o),
        o.fill && histogram(o.fill.bins, { label: "Histogram of fill", unit: "percent" })),
      card("Documents per row",
        o.documents_per_item && `Half of the rows hold at most ${plural(Math.floor(o.documents_per_item["50%"] ?? 0), "document")}.`,
        o.documents_per_item && histogram(
          o.documents_per_item.bins,
          { label: "Histogram of documents per row", unit: "documents" }
        )),
      card("Parts of messages", "What the tokens are: words, headers, reasoning, calls, ends of turns.",
        o.by_part && shares(o.by_part)
      ),
      card("Sources",
        `Where the conversations come from${part.sources.length > 12 ? "; the twelve largest" : ""}.`,
        o.by_source && shares(
          o.by_source.slice(0, 12).map(
            (row) => (
              {
                ...row,
                link: address(
                  { page: "browse", dataset: route.dataset, split: route.split, params: { source: row.name } }
                )
              }
            )
          )
        )
      ),
    ),
    card("Where the tokens went", ledgerText(data), data.ledger && ledger(data.ledger), "full"),
    card("Provenance", null,
      Object.keys(data.about).length > 0 ? provenance(data) : h("p", { class: "quiet" },
        "There is no manifest: nothing is known about how this was built."
      ),
      "full"
    ));
}

function lengthText(data, lengths) {
  const half = count(Math.floor(lengths["50%"] ?? 0));
  const most = `Half have at most ${half}, the longest has ${count(lengths["100%"] ?? 0)}.`;
  return `Tokens of each ${data.packed ? "document" : data.item}. ${most}`;
}

function fillText(o) {
  const full = `${plural(o.fill.full, "row")} of ${count(o.items)} ${o.fill.full === 1 ? "is" : "are"} full`;
  return `${full} to the last position; the emptiest is filled to ${percent(o.fill["0%"], 1)}.`;
}

function policies(o, part) {
  const rows = o.policies.map((row) => ({ name: row.name, tokens: o.tokens, trained: row.trained }));
  return shares(
    [...(part.has_weights ? [{ name: "as stored", tokens: o.tokens, trained: o.trained }] : []), ...rows]
  );
}

const FATES = [
  ["trained", "trained"],
  ["context", "context"],
  ["injected", "repeated"],
  ["cut", "cut"],
  ["dropped", "dropped"]
];

function ledgerText(data) {
  return data.ledger && "Every token that the template wrote, over all splits, and what became of it.";
}

function sums(ledger, source) {
  const found = { rendered: 0, trained: 0, context: 0, cut: 0, dropped: 0, injected: 0 };
  for (const fates of Object.values(ledger.tokens?.[source] || {})) {
    for (const [fate, n] of Object.entries(fates)) found[fate.split("_")[0]] = (found[fate.split("_")[0]] || 0) + n;
  }
  const records = ledger.records?.[source] || {};
  const all = (part) => Object.values(records[part] || {}).reduce((sum, n) => sum + n, 0);
  return { ...found, built: all("built"), left_out: all("quarantined") + all("skipped") };
}

function ledger(book) {
  const names = [...new Set([...Object.keys(book.records || {}), ...Object.keys(book.tokens || {})])].sort();
  const rows = names.map((name) => [name, sums(book, name)]);
  const total = {};
  for (const [, row] of rows) for (const [key, n] of Object.entries(row)) total[key] = (total[key] || 0) + n;
  const padding = book.padding || 0;
  const line = (name, row) => h("tr", {},
    h("td", {}, name),
    [
      "built",
      "left_out",
      "trained",
      "context",
      "cut",
      "dropped",
      "injected"
    ].map((key) => h("td", { class: "n" }, count(row[key] || 0)))
  );
  return h("div", {},
    flow(
      [...FATES.map(([key, name]) => [key, name, total[key] || 0]), ["padding", "padding", padding]],
      (total.rendered || 0) + (total.injected || 0) + padding
    ),
    h("div", { class: "wide" }, h("table", {},
      h("thead", {},
        h("tr", {},
          [
            "source",
            "records",
            "left out",
            "trained",
            "context",
            "cut",
            "dropped",
            "repeated"
          ].map((name, i) => h("th", { class: i ? "n" : "", scope: "col" }, name))
        )
      ),
      h("tbody", {}, rows.map(([name, row]) => line(name, row)), rows.length > 1 && line("all", total)))));
}

const fact = (name, value) => value !== undefined && value !== null && value !== "" && [
  h("dt", {}, name),
  h("dd", {}, value)
];
const short = (text) => h("code", { title: text }, String(text).slice(0, 16));

function provenance(data) {
  const about = data.about;
  const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const named = (part) => part && (part.name ? [part.name, " ", part.fingerprint && short(part.fingerprint)] : plain(part));
  const packing = about.recipe?.packing;
  const commit = about.git_sha ? `, commit ${about.git_sha.slice(0, 12)}` : "";
  return h("div", {},
    h("dl", { class: "facts" },
      fact("layout", about.schema_version),
      fact("tokenizer", named(about.tokenizer)),
      fact("template", named(about.template)),
      fact("policy", named(about.policy)),
      fact("packing",
        packing && Object.entries(packing).filter(([, v]) => v !== null).map(
          ([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`
        ).join(", ")
      ),
      fact("made by",
        about.package_version && `chatmill ${about.package_version}${commit}`
      ),
      fact("finished",
        about.created_unix_s && new Date(
          1000 * about.created_unix_s
        ).toISOString().replace("T", " ").slice(0, 16) + " UTC"
      ),
      fact("fingerprint", about.fingerprint && short(about.fingerprint))),
    about.inputs?.length > 0 && h("details", { open: about.inputs.length < 6 }, h("summary", {},
      plural(about.inputs.length, "input file")
    ),
      h("div", { class: "wide" }, h("table", {}, h("thead", {},
        h("tr", {}, ["file", "source", "size", "sha256"].map((n) => h("th", { scope: "col" }, n)))
      ),
        h("tbody", {},
          about.inputs.slice(0, 200).map(
            (file) => h("tr", {},
              h("td", {}, h("code", {}, file.path)),
              h("td", {}, file.source ?? "–"),
              h("td", { class: "num" }, bytes(file.bytes ?? 0)),
              h("td", {}, short(file.sha256 ?? ""))
            )
          )
        )))),
    about.recipe && h("details", {},
      h("summary", {}, "The recipe, every default written out"),
      h("pre", { class: "wide mono small" }, JSON.stringify(about.recipe, null, 2))
    ));
}
