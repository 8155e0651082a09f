// Two datasets side by side: what their manifests say differently, the sums, and each changed record.

import { get } from "./api.js";
import { h, replace, say } from "./dom.js";
import { count, oneLine, percent, plural, visible } from "./format.js";
import { address, dataset, note, splitPath } from "./state.js";

const NAMES = {
  equal: "equal",
  ids: "other ids",
  weights: "other weights",
  kinds: "other kinds",
  only_in_a: "only in A",
  only_in_b: "only in B"
};
const WORDS = { ...NAMES, equal: "in another split" };

export async function compare(main, route, signal) {
  const page = new Compare(main, route, signal);
  await page.load();
  return page;
}

class Compare {
  constructor(main, route, signal) {
    Object.assign(this, { main, route, signal, chosen: Number(route.rest[0]) || 0 });
  }

  async load() {
    for (;;) {
      this.found = await get("compare", {}, this.signal);
      if (this.found.done) break;
      if (this.found.problem) {
        replace(this.main, h("h1", {}, "Compare"), h("p", { class: "error" }, this.found.problem));
        return;
      }
      const { done_records: done, records } = this.found;
      const counted = records ? `${count(done)} of ${count(records)}` : "matching them";
      replace(
        this.main,
        h("h1", {}, "Compare"),
        h("p", { class: "quiet", id: "comparing" },
          `Comparing record by record: ${counted}, ${Math.round(this.found.seconds)} s`
        ),
        h("progress", { "aria-label": "Records compared", ...(records ? { max: records, value: done } : {}) })
      );
      await new Promise((wake) => setTimeout(wake, 300));
      if (this.signal.aborted) return;
    }
    this.draw();
  }

  draw() {
    const { found } = this;
    const { a, b } = found.totals;
    const delta = (old, now) => (old === now ? "0" : `${now > old ? "+" : "−"}${count(Math.abs(now - old))}`);
    this.side = h("section", { class: "card" });
    this.picks = h("nav", {
      class: "card picks",
      "aria-label": "Changed records"
    }, found.changed.map((one, i) => h("button", { type: "button", onclick: () => this.pick(i) },
      h("b", {}, oneLine(one.record_id ?? "(no record id)")), h("span", { class: "small quiet" },
        `${WORDS[one.change]} · ${trainedChange(one)}`
      ))));
    replace(this.main,
      h("div", { class: "head" },
        h("h1", {}, "Compare"),
        h("span", { class: "badge" }, `A ${dataset("a").name}`),
        h("span", { class: "quiet" }, "against"),
        h("span", { class: "badge" }, `B ${dataset("b").name}`)
      ),
      found.notes.map((text) => h("p", { class: "note" }, text)),
      h("div", { class: "twice" },
        h("section", { class: "card" }, h("h2", {},
          found.equal ? "All records are equal" : `${plural(found.differing, "record differs", "records differ")}`
        ),
          h("div", { class: "counts", id: "counts" }, Object.entries(NAMES).map(
            ([key, name]) => h("div", { class: `tile${found.counts[key] ? "" : " zero"}`, data: { change: key } },
              h("b", {}, count(found.counts[key])),
              h("span", {}, name)
            )
          ),
            found.moved_to_another_split > 0 && h("div", { class: "tile" },
              h("b", {}, count(found.moved_to_another_split)),
              h("span", {}, "in another split")
            )),
          h("table", { id: "totals" }, h("thead", {},
            h("tr", {},
              ["", "A", "B", "B − A"].map((name, i) => h("th", { class: i ? "n" : "", scope: "col" }, name))
            )
          ),
            h("tbody", {},
              ["records", "tokens", "trained"].map(
                (name) => h("tr", {},
                  h("td", {}, name),
                  h("td", { class: "n" }, count(a[name])),
                  h("td", { class: "n" }, count(b[name])),
                  h("td", { class: "n" }, delta(a[name], b[name]))
                )
              )
            ))),
        h("section", { class: "card" }, h("h2", {},
          "What the manifests say differently"
        ), found.manifest.length ? h("div", { class: "wide" }, h("table", {}, h(
          "thead",
          {},
          h("tr", {}, ["", "A", "B"].map((name) => h("th", { scope: "col" }, name)))
        ),
          h("tbody", {},
            found.manifest.slice(0, 60).map(
              (row) => h("tr", {},
                h("td", {}, row.what),
                h("td", { class: "mono" }, value(row.a)),
                h("td", { class: "mono" }, value(row.b))
              )
            )
          ))) : h("p", { class: "quiet" }, "Nothing, or there are none to compare."))),
      found.changed.length > 0 && h("div", { class: "layout" }, this.picks, this.side),
      found.differing > found.changed.length && h("p", { class: "quiet" },
        `The first ${count(found.changed.length)} of ${count(found.differing)} are listed; chatmill diff --show has more.`
      ));
    if (found.changed.length) this.pick(Math.min(this.chosen, found.changed.length - 1));
  }

  async pick(i) {
    this.chosen = i;
    [...this.picks.children].forEach(
      (node, k) => (k === i ? node.setAttribute("aria-current", "true") : node.removeAttribute("aria-current"))
    );
    this.picks.children[i].scrollIntoView({ block: "nearest" });
    note({}, [String(i)]);
    const record = await get(`compare/${i}`, {}, this.signal);
    if (this.chosen === i) this.drawRecord(record);
  }

  head(letter, one) {
    const link = one && dataset(letter).layout === "episodes" && address(
      { page: "item", dataset: letter, split: one.place[0], rest: [one.place[1]], params: {} }
    );
    const where = one && `${one.place[0]} ${count(one.place[1])}`;
    return h("div", { class: `side-head ${letter}` }, `${letter === "a" ? "− A" : "+ B"} ${dataset(letter).name}`,
      h("small", {},
        one ? [
          link ? h("a", { href: link }, where) : where,
          ` · ${plural(one.tokens, "token")}, ${count(one.trained)} trained (${percent(one.trained, one.tokens)})`
        ] : "not there"
      ));
  }

  drawRecord(record) {
    const cells = [];
    const at = { a: 0, b: 0 };
    let minus = [];
    let plus = [];
    const flush = () => {
      for (
        let i = 0; i < Math.max(minus.length, plus.length); i += 1
      ) cells.push(cell(minus[i], "minus", "−"), cell(plus[i], "plus", "+"));
      minus = [];
      plus = [];
    };
    for (const line of record.lines) {
      if (line.sign === "-") {
        if (plus.length) flush();
        minus.push(line);
        at.a += line.tokens;
      } else if (line.sign === "+") {
        plus.push(line);
        at.b += line.tokens;
      } else {
        flush();
        cells.push(this.equal(record, line.tokens, at.a));
        at.a += line.tokens;
        at.b += line.tokens;
      }
    }
    flush();
    replace(this.side, h("h2", {},
      `${oneLine(record.record_id ?? "(no record id)")} `,
      h("span", { class: "badge" }, WORDS[record.change])
    ), h("p", {}),
      h("div", { class: "sides", id: "sides" }, this.head("a", record.a), this.head("b", record.b), cells));
    say(`${record.record_id ?? "record"}: ${WORDS[record.change]}`);
  }

  // A stretch that is the same in both; of episodes it can be shown.
  equal(record, tokens, from) {
    const box = h("div", { class: "equal" });
    const text = `${plural(tokens, "equal token")}`;
    if (dataset("a").layout !== "episodes" || !record.a) return replace(box, document.createTextNode(text));
    const [part, number] = record.a.place;
    const open = async () => {
      const found = await get(
        `${splitPath("a", part)}/item/${number}`,
        { first: from || "", count: Math.min(tokens, 4096) },
        this.signal
      );
      replace(
        box,
        document.createTextNode(text),
        h("div", { class: "text", dir: "auto" },
          found.runs.map((run) => run.pieces.map((piece) => visible(piece.t)).join("")).join("")
        )
      );
    };
    return replace(box, h("button", { type: "button", onclick: open }, `${text}: show`));
  }

  keys() {
    const step = (n) => this.found?.changed?.length && this.pick(
      Math.min(Math.max(this.chosen + n, 0), this.found.changed.length - 1)
    );
    return { j: () => step(1), k: () => step(-1) };
  }
}

const value = (it) => (it === null || it === undefined ? "–" : typeof it === "string" ? it : JSON.stringify(it));

function trainedChange(one) {
  const sides = [one.a, one.b].filter(Boolean);
  const numbers = [...new Set(sides.map((side) => count(side.trained)))];
  return `${numbers.join(" → ")} trained`;
}

function cell(line, kind, sign) {
  if (!line) return h("div", { class: "cell none", "aria-hidden": "true" });
  const role = (line.kind ?? "none").split(".")[0];
  const left = (n) => n > 0 && h("span", { class: "quiet small" }, ` [${plural(n, "equal token")}] `);
  return h("div", { class: `cell ${kind}`, dir: "auto" }, h("span", { class: "sign" }, sign), line.kind && h(
    "span",
    { class: `kind role ${role}` },
    line.kind.replace("_", " ")
  ),
    h("span", { class: "state" },
      line.weight > 0 ? (line.weight === 1 ? "trained " : `trained ×${+line.weight.toPrecision(3)} `) : "context "
    ), left(line.equal_before),
    h("span", { class: line.weight > 0 ? "is-trained" : "" },
      visible((line.text ?? line.ids.join(" ")).slice(0, 20000))
    ), left(line.equal_after));
}
