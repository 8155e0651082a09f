// Numbers and text as they are shown.

const whole = new Intl.NumberFormat("en-US");
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const count = (n) => whole.format(n);
export const compact = (n) => (Math.abs(n) < 10000 ? whole.format(n) : short.format(n));

export function percent(part, all) {
  if (!all) return "–";
  const share = (100 * part) / all;
  const text = share.toFixed(1);
  if (part && text === "0.0") return "<0.1%";
  if (part !== all && text === "100.0") return ">99.9%";
  return `${text}%`;
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function bytes(n) {
  for (const unit of ["bytes", "KB", "MB", "GB"]) {
    if (n < 1000 || unit === "GB") return `${unit === "bytes" ? n : n.toFixed(1)} ${unit}`;
    n /= 1000;
  }
  return "";
}

// Characters that would hide, move or turn text are spelled out: C0 and C1 controls, direction marks, joiners, BOM.
const HIDDEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180e"
    + "\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufe00-\\ufe0f\\ufeff\\ufff9-\\ufffb]",
  "g",
);
const KEPT = new Set(
  ["\u200d", "\ufe0f", "\ufe0e", "\u200c"]
); // join emoji and letters: harmless between other characters

export function spelled(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return `\\u${code.toString(16).padStart(4, "0")}`;
}

export function visible(text) {
  return text.replace(HIDDEN, (c) => (KEPT.has(c) && text.length > 1 ? c : spelled(c)));
}

// The same on one line: for lists.
export const oneLine = (text) => visible(text.replace(/\s+/g, " "));

export function hex(text) {
  return [...new TextEncoder().encode(text)].map((b) => b.toString(16).padStart(2, "0")).join(" ");
}
