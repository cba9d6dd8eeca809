// Small helpers: elements (text from a model or a peer stays text), numbers with units, and requests.

/** element("div", {class: "x"}, child, "text", ...) */
export function element(name, attributes = {}, ...children) {
  const made = name === "svg" || SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "width%") made.style.width = `${value}%`;
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}
const SVG = new Set(["rect", "text", "line", "title", "g", "circle", "polyline"]);

/** table(["name", "#number"], rows of cells or {attributes, cells}); a column named #... is right-aligned. */
export function table(columns, rows) {
  const numeric = columns.map((name) => name.startsWith("#"));
  const head = columns.map((name, i) => element("th", { scope: "col", class: numeric[i] ? "n" : null }, name.replace("#", "")));
  const body = rows.map((row) => {
    const { attributes = {}, cells = row } = row;
    return element("tr", attributes, cells.map((cell, i) => element("td", { class: numeric[i] ? "n" : null }, cell ?? "–")));
  });
  return element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body));
}

export const ms = (value) => value === null || value === undefined ? "–" : value < 10 ? `${value.toFixed(1)} ms` : value < 10_000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
export const bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value >= 99.95 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
};
export const percent = (part, whole) => whole ? `${Math.round(100 * part / whole)} %` : "–";

const KEY = "mooncake-api-key";
let asking = null;

/** fetch with the API key; asks the reader for it on the first 401. */
export async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.status !== 401) return answer;
  asking ??= login().finally(() => { asking = null; });
  await asking;
  return request(path, options);
}

function login() {
  const dialog = document.getElementById("login");
  const field = document.getElementById("key");
  field.value = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => { sessionStorage.setItem(KEY, field.value); done(); }, { once: true }));
}
