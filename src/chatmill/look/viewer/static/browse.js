// The list of items: filters over stored columns, pages, and a search that streams.

import { ApiError, get, stream } from "./api.js";
import { byId, h, replace, say } from "./dom.js";
import { count, oneLine, percent, plural } from "./format.js";
import { address, dataset, go, note, split, splitPath } from "./state.js";

const PAGE = 50;
const FILTERS = ["source", "min_tokens", "max_tokens", "min_share", "max_share", "role", "sort"];
const SORTS = [
  ["stored", "as stored"],
  ["longest", "longest first"],
  ["shortest", "shortest first"],
  ["most_trained", "most trained first"],
  ["least_trained", "least trained first"]
];

export async function browse(main, route, signal) {
  const page = new Browse(main, route, signal);
  await page.show();
  return page;
}

class Browse {
  constructor(main, route, signal) {
    Object.assign(this, { main, route, signal, chosen: -1, rows: [], search: null });
    this.data = dataset(route.dataset);
    this.part = split(route.dataset, route.split);
    this.base = splitPath(route.dataset, route.split);
    this.first = Number(route.params.first) || 0;
    signal.addEventListener("abort", () => this.search?.abort());
  }

  get filters() {
    return Object.fromEntries(FILTERS.map((name) => [name, this.route.params[name]]));
  }

  itemAddress(row, extra = {}) {
    return address(
      { page: "item", dataset: this.route.dataset, split: this.route.split, rest: [row.number], params: extra }
    );
  }

  async show() {
    const { data, part } = this;
    const one = data.item;
    this.list = h("div", { id: "list" });
    this.pager = h("div", { class: "pager" });
    this.status = h("div", { class: "searching", id: "search-status", hidden: true });
    const p = this.route.params;
    const number = (name, label, attributes) => h("input",
      { type: "number", name, "aria-label": label, value: p[name] ?? "", min: 0, step: "any", ...attributes }
    );
    this.roleSelect = h("select", { name: "role" }, h("option", { value: "" }, "any"));
    this.form = h("form", {
      class: "filters",
      id: "filters",
      onsubmit: (event) => { event.preventDefault(); this.apply(); }
    },
      part.sources.length > 0 && h("label", { class: "field" },
        "source",
        h("select", { name: "source" },
          h("option", { value: "" }, "all"),
          part.sources.map((name) => h("option", { value: name }, name))
        )
      ),
      h("label", { class: "field two" },
        "tokens",
        h("span", { class: "pair" },
          number("min_tokens", "tokens, at least", { placeholder: "from" }),
          "–",
          number("max_tokens", "tokens, at most", { placeholder: "to" })
        )
      ),
      part.has_weights && h("label", { class: "field two" },
        "trained, %",
        h("span", { class: "pair" },
          number("min_share", "trained percent, at least", { placeholder: "from", max: 100 }),
          "–",
          number("max_share", "trained percent, at most", { placeholder: "to", max: 100 })
        )
      ),
      part.has_kinds && h("label", { class: "field" }, "with role", this.roleSelect),
      h("label", { class: "field" },
        "order",
        h("select", { name: "sort" }, SORTS.map(([value, name]) => h("option", { value }, name)))
      ),
      h("div", { class: "actions" },
        h("button", { type: "submit", class: "primary" }, "Filter"),
        h("button", { type: "button", id: "clear", onclick: () => this.clear() }, "Clear")
      ));
    for (const name of ["source", "sort"]) if (
      this.form.elements[name] && p[name]
    ) this.form.elements[name].value = p[name];
    const words = h("input",
      {
        type: "search",
        id: "search",
        name: "q",
        placeholder: data.tokenizer ? "Search the text…" : "Search ids, such as 151644 872",
        "aria-label": "Search the text",
        value: p.q ?? "",
        maxlength: 500
      }
    );
    this.searchForm = h("form", {
      class: "searching",
      role: "search",
      onsubmit: (event) => { event.preventDefault(); this.find(words.value); }
    },
      words, h("button", { type: "submit", class: "primary" }, "Search"),
      part.has_record_ids && h("button",
        { type: "button", id: "by-id", title: "Open the record with this id", onclick: () => this.byId(words.value) },
        "Go to record id"
      ));
    replace(this.main, h("div", { class: "head" },
      h("h1", {}, `Browse ${one}s`),
      h("span", { class: "badge" }, part.name),
      h("span", { class: "quiet" }, plural(part.items, one))
    ),
      h("section", { class: "card" }, this.form, this.searchForm, this.status),
      this.pager, this.list);
    if (p.q) await this.find(p.q);
    else await this.load();
  }

  apply() {
    const values = Object.fromEntries(FILTERS.map((name) => [name, this.form.elements[name]?.value ?? ""]));
    if (values.sort === "stored") values.sort = "";
    this.first = 0;
    note({ ...values, first: "" });
    this.route.params = { ...this.route.params, ...values, first: "" };
    const words = byId("search").value;
    if (this.search && words) this.find(words);
    else this.load();
  }

  clear() {
    this.form.reset();
    for (const field of this.form.elements) if (field.name) field.value = field.name === "sort" ? "stored" : "";
    byId("search").value = "";
    this.search?.abort();
    this.search = null;
    this.status.hidden = true;
    note({ q: "" });
    this.route.params = {};
    this.apply();
  }

  async load(first = this.first) {
    try {
      const found = await get(`${this.base}/items`, { ...this.filters, first, count: PAGE }, this.signal);
      this.found = found;
      this.first = found.first;
      note({ first: this.first || "" });
      this.fillRoles(found.roles);
      this.draw(found.rows);
      this.drawPager(found);
      say(`${plural(found.matched, this.data.item)} listed`);
      this.waitForScan(found);
    } catch (error) {
      if (error.name !== "AbortError") replace(this.list, h("p", { class: "error" }, error.message));
    }
  }

  // Trained counts and roles appear when the pass over the labels is done.
  async waitForScan(found) {
    if (found.scan.done || found.scan.problem || this.waiting) return;
    this.waiting = true;
    while (!this.signal.aborted) {
      await new Promise((wake) => setTimeout(wake, 700));
      if (this.signal.aborted) return;
      const now = await get(`${this.base}/items`, { first: 0, count: 1 }, this.signal).catch(() => null);
      if (!now || now.scan.done || now.scan.problem) break;
      const label = byId("scan-note");
      if (label) label.textContent = scanNote(now.scan);
    }
    this.waiting = false;
    if (!this.search) this.load();
  }

  fillRoles(roles) {
    const chosen = this.roleSelect.value || this.route.params.role || "";
    replace(
      this.roleSelect,
      h("option", { value: "" }, "any"),
      roles.map((name) => h("option", { value: name }, name))
    );
    if (chosen && !roles.includes(chosen)) this.roleSelect.append(h("option", { value: chosen }, chosen));
    this.roleSelect.value = chosen;
  }

  drawPager(found) {
    const last = Math.max(0, Math.floor((found.matched - 1) / PAGE) * PAGE);
    const to = Math.min(found.first + PAGE, found.matched);
    const button = (text, label, first, disabled) => h("button",
      { type: "button", "aria-label": label, title: label, disabled, onclick: () => this.load(first) },
      text
    );
    const jump = h("input",
      {
        type: "number",
        min: 0,
        max: this.part.items - 1,
        placeholder: "number",
        "aria-label": `Number of the ${this.data.item} to open`
      }
    );
    replace(this.pager,
      h("span", { id: "matched" }, found.matched ? [
        h("b", { class: "num" }, `${count(found.first + 1)}–${count(to)}`),
        ` of ${count(found.matched)}`
      ] : "Nothing passes these filters",
        found.matched !== found.items && h("span", { class: "quiet" }, ` (of ${count(found.items)})`)),
      button("«", "First page", 0, found.first === 0), button(
        "‹",
        "Previous page (p)",
        Math.max(0, found.first - PAGE),
        found.first === 0
      ),
      button(
        "›",
        "Next page (n)",
        found.first + PAGE,
        to >= found.matched
      ), button("»", "Last page", last, found.first >= last),
      !found.scan.done && h("span", { class: "quiet small", id: "scan-note" }, scanNote(found.scan)),
      h("span", { class: "grow" }),
      h("form", {
        class: "actions",
        onsubmit: (event) => {
          event.preventDefault();
          if (jump.value !== "") go(
            { page: "item", dataset: this.route.dataset, split: this.route.split, rest: [jump.value], params: {} }
          );
        }
      },
        jump, " ", h("button", { type: "submit" }, "Open")));
  }

  line(row, i, text) {
    const share = row.trained === null ? null : (100 * row.trained) / Math.max(row.tokens, 1);
    const { part } = this;
    const cells = [
      h("td", { class: "n", "data-label": "#" }, count(row.number)),
      h("td", { class: "id" },
        h("a", { href: this.itemAddress(row, row.at === undefined ? {} : { at: row.at, hit: row.tokensHit }) },
          oneLine(row.record_id ?? `${this.data.item} ${row.number}`)
        )
      ),
      part.sources.length > 0 && h("td", {}, row.source ?? "–"),
      h("td", { class: "n", "data-label": "tokens" }, count(row.tokens)),
      part.capacity && h("td", { class: "n", "data-label": "documents" }, count(row.documents ?? 1)),
      part.capacity && h("td", { "data-label": "fill" },
        h("span", { class: "mini plain" }, h("i", { style: { width: `${(100 * row.tokens) / part.capacity}%` } })),
        percent(row.tokens, part.capacity)
      ),
      part.has_weights && h("td", { "data-label": "trained" },
        share === null ? "…" : [
          h("span", { class: "mini" }, h("i", { style: { width: `${share}%` } })),
          h("span", { class: "num" }, percent(row.trained, row.tokens))
        ]
      ),
      part.has_turns && h("td", { class: "n", "data-label": "turns" }, count(row.turns ?? 0)),
      h("td", { class: "text" }, text),
    ];
    return h("tr",
      {
        "aria-selected": i === this.chosen ? "true" : "false",
        data: { number: row.number },
        onclick: (event) => { if (!event.target.closest("a")) event.currentTarget.querySelector("a").click(); }
      },
      cells
    );
  }

  table(rows) {
    const { part } = this;
    const names = [
      "#",
      part.has_record_ids ? "record" : this.data.item,
      part.sources.length > 0 && "source",
      "tokens",
      part.capacity && "documents",
      part.capacity && "fill",
      part.has_weights && "trained",
      part.has_turns && "turns",
      this.search ? "found" : "begins with"
    ];
    const right = new Set(["#", "tokens", "documents", "turns"]);
    this.body = h("tbody", {}, rows);
    return h("section", { class: "card list" },
      h("table", {},
        h("thead", {},
          h("tr", {},
            names.filter(Boolean).map((name) => h("th", { scope: "col", class: right.has(name) ? "n" : "" }, name))
          )
        ),
        this.body
      )
    );
  }

  draw(rows) {
    this.rows = rows;
    this.chosen = -1;
    replace(
      this.list,
      rows.length ? this.table(
        rows.map((row, i) => this.line(row, i, oneLine(row.text)))
      ) : h("p", { class: "quiet pad" }, "No items.")
    );
  }

  async byId(text) {
    if (!text) return;
    const found = await get(`${this.base}/find`, { id: text }, this.signal);
    if (found.numbers.length) {
      go(
        { page: "item", dataset: this.route.dataset, split: this.route.split, rest: [found.numbers[0]], params: {} }
      );
      return;
    }
    this.status.hidden = false;
    replace(this.status, h("span", {}, `No record has the id ${oneLine(text)}.`, found.close.length > 0 && " Close ones: ",
      found.close.map(
        (id, i) => [i ? ", " : "", h("button", { type: "button", onclick: () => this.byId(id) }, oneLine(id))]
      )));
  }

  async find(words) {
    this.search?.abort();
    this.search = null;
    if (!words) {
      this.status.hidden = true;
      note({ q: "" });
      this.route.params.q = "";
      await this.load();
      return;
    }
    const control = new AbortController();
    this.search = control;
    note({ q: words, first: "" });
    this.route.params.q = words;
    this.rows = [];
    this.chosen = -1;
    replace(this.pager);
    replace(this.list, this.table([]));
    const bar = h("progress", { max: this.part.items, value: 0, "aria-label": "Searched" });
    const text = h("span", { id: "search-text" }, "Searching…");
    const cancel = h("button", { type: "button", id: "cancel", onclick: () => control.abort() }, "Cancel");
    const back = h("button", { type: "button", onclick: () => { byId("search").value = ""; this.find(""); } },
      "Back to the list"
    );
    this.status.hidden = false;
    replace(this.status, text, h("span", { class: "grow" }), cancel, back, bar);
    const all = plural(this.part.items, this.data.item);
    let last = { items: 0, hits: 0 };
    const ended = (message) => {
      if (this.search !== control) return;
      text.textContent = message;
      cancel.hidden = true;
      bar.hidden = true;
      say(message);
    };
    try {
      await stream(`${this.base}/search`, { ...this.filters, sort: "", q: words }, (line) => {
        if (line.error) throw new ApiError(line.error);
        if (line.hit) this.addHit(line.hit);
        else {
          last = line;
          bar.value = line.items;
          if (!line.done) text.textContent = `${plural(line.hits, "hit")} in the first ${count(line.items)} of ${all}…`;
        }
      }, control.signal);
      ended(
        last.stopped
          ? `The first ${count(last.hits)} hits; ${count(last.items)} of ${all} were searched.`
          : `${plural(last.hits, "hit")} in ${all}.`
      );
    } catch (error) {
      if (error.name === "AbortError") ended(
        `Cancelled: ${plural(last.hits, "hit")} in the first ${count(last.items)} of ${all}.`
      );
      else ended(error.message);
    }
  }

  addHit(hit) {
    const row = { ...hit, tokensHit: hit.tokens_hit };
    this.rows.push(row);
    this.body.append(
      this.line(
        row,
        this.rows.length - 1,
        [oneLine(hit.before).slice(-48), h("mark", {}, oneLine(hit.match)), oneLine(hit.after)]
      )
    );
  }

  // keys
  move(step) {
    const rows = this.body ? [...this.body.children] : [];
    if (!rows.length) return;
    this.chosen = Math.min(Math.max(this.chosen + step, 0), rows.length - 1);
    rows.forEach((row, i) => row.setAttribute("aria-selected", i === this.chosen ? "true" : "false"));
    rows[this.chosen].querySelector("a").focus({ preventScroll: true });
    rows[this.chosen].scrollIntoView({ block: "nearest" });
  }

  keys() {
    return {
      j: () => this.move(1), k: () => this.move(-1), ArrowDown: () => this.move(1), ArrowUp: () => this.move(-1),
      Enter: () => this.body?.children[this.chosen]?.querySelector("a").click(),
      n: () => this.found && !this.search && this.first + PAGE < this.found.matched && this.load(this.first + PAGE),
      p: () => this.found && !this.search && this.first > 0 && this.load(Math.max(0, this.first - PAGE)),
      Escape: () => this.search?.abort(),
    };
  }
}

const scanNote = (scan) => `counting labels, ${Math.round(100 * scan.share)}%`;
