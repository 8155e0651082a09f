// What all pages share: the opened datasets, the place in the address, and the theme.

export const state = { about: null, route: null, hash: "" };

export const splitPath = (dataset, split) => `${encodeURIComponent(dataset)}/${encodeURIComponent(split)}`;

export function dataset(key) {
  return state.about.datasets.find((one) => one.key === key);
}

export function split(key, name) {
  return dataset(key).splits.find((one) => one.name === name);
}

// "#/a/train/item/7?colour=kind" -> { page, dataset, split, rest, params }
export function parse(hash) {
  const [path, search] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  const params = Object.fromEntries(new URLSearchParams(search || ""));
  if (parts[0] === "compare") return { page: "compare", rest: parts.slice(1), params };
  const chosen = state.about.datasets.find((one) => one.key === parts[0]) || state.about.datasets[0];
  const named = chosen.splits.find((one) => one.name === parts[1]) || chosen.splits[0];
  const page = ["browse", "item"].includes(parts[2]) ? parts[2] : "overview";
  return { page, dataset: chosen.key, split: named.name, rest: parts.slice(3), params };
}

export function address(route) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(route.params || {})) {
    if (value !== null && value !== undefined && value !== "") search.set(name, value);
  }
  const rest = (route.rest || []).map((part) => `/${encodeURIComponent(part)}`).join("");
  const base = route.page === "compare" ? "compare" : `${splitPath(route.dataset, route.split)}/${route.page}`;
  const text = search.toString();
  return `#/${base}${rest}${text ? `?${text}` : ""}`;
}

export function go(route) {
  location.hash = address(route);
}

// Changes parameters of the page without a new entry in the history, and without drawing the page again.
// Nothing where the reader is already on the way to another page: its address is set, and it is not drawn yet.
export function note(params, rest = state.route.rest) {
  if (location.hash !== state.hash) return;
  state.route = { ...state.route, rest, params: { ...state.route.params, ...params } };
  history.replaceState(null, "", address(state.route));
  state.hash = location.hash;
}

const remembered = {
  get(name) {
    try {
      return localStorage.getItem(`chatmill-${name}`);
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`chatmill-${name}`, value);
    } catch {
      // a browser that stores nothing: the choice lasts until the page is closed
    }
  },
};
export { remembered };

export function applyTheme(choice) {
  const dark = choice ? choice === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

export function switchTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  remembered.set("theme", next);
  applyTheme(next);
}
