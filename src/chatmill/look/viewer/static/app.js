// The frame: which page is shown, the bar at the top, and the keys.

import { ApiError, get } from "./api.js";
import { browse } from "./browse.js";
import { compare } from "./compare.js";
import { byId, h, replace } from "./dom.js";
import { hideTip, item } from "./item.js";
import { overview } from "./overview.js";
import { address, applyTheme, dataset, go, parse, remembered, split, state, switchTheme } from "./state.js";

const PAGES = { overview, browse, item, compare };
const KEYS = [
  ["?", "these keys"], ["g o", "overview"], ["g b", "browse"], ["g d", "compare"], ["s", "next split"], ["/", "search"], [
    "t",
    "dark or light"
  ], ["r", "a random item"],
  [
    "j  k",
    "next, before: row, item, record"
  ], ["Enter", "open the chosen row"], ["n  p", "next page, page before"], ["→  ←", "next token, token before"],
  [
    "1 2 3 4",
    "colour by trained, kind, document, position"
  ], ["c", "next colouring"], ["f", "first trained token"], ["w", "choose a policy"], [
    "b",
    "from an item to the list"
  ], ["Esc", "close; cancel a search"],
];

// The cookie carries the token from here on; an address that is copied does not give it away.
if (new URLSearchParams(location.search).has("token")) history.replaceState(null, "", location.pathname + location.hash);

let current = { controller: new AbortController(), page: null };
let pending = "";

async function show() {
  current.controller.abort();
  const controller = new AbortController();
  const mine = { controller, page: null };
  current = mine;
  hideTip();
  const route = parse(location.hash);
  const before = state.route;
  state.route = route;
  state.hash = location.hash;
  drawBar(route);
  const main = byId("main");
  if (!before || before.page !== route.page) scrollTo(0, 0);
  try {
    const page = await PAGES[route.page](main, route, controller.signal);
    if (current === mine) mine.page = page ?? null;
    main.dataset.ready = location.hash;
  } catch (error) {
    if (error.name === "AbortError" || current !== mine) return;
    replace(
      main,
      h("p", { class: "error" }, error instanceof ApiError ? error.message : `The page failed: ${error.message}`),
      h("p", {}, h("a", { href: "#/" }, "Back to the overview"))
    );
    main.dataset.ready = location.hash;
    if (!(error instanceof ApiError)) throw error;
  }
}

function drawBar(route) {
  const { datasets } = state.about;
  const here = route.page === "compare" ? { dataset: datasets[0].key, split: datasets[0].splits[0].name } : route;
  const move = (changes) => go(
    { page: route.page === "browse" ? "browse" : "overview", ...here, params: {}, rest: [], ...changes }
  );
  const choose = (label, value, options, onchange) => h("select",
    { "aria-label": label, onchange: (event) => onchange(event.target.value) },
    options.map(([key, name]) => h("option", { value: key, selected: key === value }, name))
  );
  replace(byId("where"),
    datasets.length > 1 && route.page !== "compare" && choose(
      "Dataset",
      here.dataset,
      datasets.map((one) => [one.key, `${one.key.toUpperCase()} ${one.name}`]),
      (key) => move({ dataset: key, split: dataset(key).splits[0].name })
    ),
    route.page !== "compare" && dataset(here.dataset).splits.length > 1 && choose(
      "Split",
      here.split,
      dataset(here.dataset).splits.map((one) => [one.name, one.name]),
      (name) => move({ split: name })
    ));
  const tab = (page, name, target) => h("a",
    {
      href: address(target),
      "aria-current": (route.page === page || (page === "browse" && route.page === "item")) ? "page" : null
    },
    name
  );
  replace(
    byId("tabs"),
    tab("overview", "Overview", { ...here, page: "overview", rest: [], params: {} }),
    tab("browse", "Browse", { ...here, page: "browse", rest: [], params: {} }),
    state.about.compare && tab("compare", "Compare", { page: "compare" })
  );
  const one = route.page === "compare" ? null : dataset(route.dataset);
  const page = route.page === "item" ? `${one.item} ${route.rest[0]}` : route.page;
  document.title = `${page} · ${one ? one.name : "two datasets"} · chatmill`;
}

function help() {
  const box = byId("keys");
  if (box.open) return box.close();
  const caps = (keys) => keys.split(" ").filter(Boolean).map((key) => [h("kbd", {}, key), " "]);
  replace(box, h("h2", { id: "keys-title" }, "Keys"),
    h("dl", {}, KEYS.map(([keys, name]) => h("div", {}, h("dt", {}, caps(keys)), h("dd", {}, name)))),
    h("p", { class: "quiet small" },
      `chatmill ${state.about.version}. Hover, tap or step over a token to see its id, bytes, kind, weight and position.`
    ),
    h("button", { type: "button", class: "primary", onclick: () => box.close() }, "Close"));
  return box.showModal();
}

function nextSplit() {
  if (state.route.page === "compare") return;
  const { splits } = dataset(state.route.dataset);
  const at = splits.findIndex((one) => one.name === state.route.split);
  if (splits.length > 1) go(
    {
      ...state.route,
      page: state.route.page === "item" ? "browse" : state.route.page,
      split: splits[(at + 1) % splits.length].name,
      rest: [],
      params: {}
    }
  );
}

function randomItem() {
  const { route } = state;
  if (route.page === "compare") return;
  const number = Math.floor(Math.random() * split(route.dataset, route.split).items);
  go(
    {
      page: "item",
      dataset: route.dataset,
      split: route.split,
      rest: [number],
      params: { colour: route.params.colour, policy: route.params.policy }
    }
  );
}

const away = (page) => () => {
  const { route } = state;
  const here = route.page === "compare" ? {
    dataset: state.about.datasets[0].key,
    split: state.about.datasets[0].splits[0].name
  } : route;
  if (page !== "compare") go({ dataset: here.dataset, split: here.split, page, params: {} });
  else if (state.about.compare) go({ page: "compare" });
};

function toSearch() {
  const field = byId("search");
  if (field) field.focus();
  else {
    away("browse")();
    setTimeout(() => byId("search")?.focus(), 150);
  }
}

const COMMON = { "?": help, "/": toSearch, t: switchTheme, s: nextSplit, r: randomItem };
const AFTER_G = { o: away("overview"), b: away("browse"), d: away("compare") };

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
  const typing = event.target.closest("input, select, textarea");
  if (typing && event.key === "Escape") typing.blur();
  if (typing && event.key !== "Escape") return;
  if (event.target.closest("button, a, summary") && (event.key === "Enter" || event.key === " ")) return;
  const after = pending;
  pending = "";
  if (event.key === "g") {
    pending = "g";
    return;
  }
  const act = after === "g" ? AFTER_G[event.key] : current.page?.keys?.()[event.key] ?? COMMON[event.key];
  if (act) {
    event.preventDefault();
    act();
  }
});

async function start() {
  applyTheme(remembered.get("theme"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme(remembered.get("theme")));
  byId("theme").addEventListener("click", switchTheme);
  byId("help").addEventListener("click", help);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  try {
    state.about = await get("about");
  } catch (error) {
    replace(byId("main"), h("p", { class: "error" }, error.message));
    return;
  }
  addEventListener("hashchange", show);
  await show();
}

start();
