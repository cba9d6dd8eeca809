// The last 15 minutes of the cluster: the nodes keep them; GET /live/history adds them up.

import { chart, momentAt } from "./chart.js";
import { bytes, element, ms, request } from "./dom.js";

const AGAIN = 4; // intervals that are asked for again, because a node may have answered before its interval ended
const LEAST = 36; // intervals that the charts show at least: 3 minutes
const MAX_RAILS = 4;
const TIERS = { kv: "KV arenas", dram: "DRAM", ssd: "SSD" };
const at = (id) => document.getElementById(id);

const intervals = new Map(); // number -> interval
let marks = [], length = 5, kept = 180, end = 0, pointed = null;

export async function startHistory() {
  at("charts").addEventListener("pointermove", (event) => {
    const svg = event.target.closest("svg.chart");
    if (svg) { pointed = momentAt(svg, event.clientX, span()); draw(); }
  });
  at("charts").addEventListener("pointerleave", () => { pointed = null; draw(); });
  for (;;) {
    if (!document.hidden) await update();
    await new Promise((done) => setTimeout(done, 1000 * length));
  }
}

async function update() {
  const newest = Math.max(0, ...intervals.keys());
  const after = Math.max(0, newest - AGAIN);
  let told;
  try {
    const answer = await request(`/live/history?after=${after}`);
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    told = await answer.json();
  } catch (error) {
    at("silent").textContent = `no history from this node: ${error.message}`;
    return;
  }
  length = told.interval_s;
  kept = told.kept;
  end = Math.floor(told.unix_s / length); // of the interval that runs
  for (const interval of told.intervals) intervals.set(interval.number, interval);
  for (const number of intervals.keys()) if (number < end - kept) intervals.delete(number);
  const moment = (after + 1) * length;
  marks = [...marks.filter((mark) => mark.unix_s < moment && mark.unix_s > (end - kept) * length), ...told.marks.filter((mark) => mark.unix_s >= moment)];
  at("silent").textContent = told.silent.length ? `without ${told.silent.join(", ")}: no answer` : "";
  draw();
}

/** Begins with the first known interval, so that a young cluster's lines are not squeezed. */
const begin = () => Math.max(end - kept, Math.min(end - LEAST, ...intervals.keys()));
const span = () => [begin() * length, end * length];

function draw() {
  if (!intervals.size) {
    at("charts").replaceChildren(element("p", { class: "soft card" }, `The first figures come ${length} s after the start.`));
    return;
  }
  const numbers = Array.from({ length: end - begin() }, (_, i) => begin() + i);
  const known = numbers.map((number) => intervals.get(number));
  const times = numbers.map((number) => (number + 0.5) * length);
  const chosen = pointed === null ? known.findLastIndex((one) => one) : times.reduce((best, t, i) => Math.abs(t - pointed) < Math.abs(times[best] - pointed) ? i : best, 0);
  const shown = marks.filter((mark) => mark.unix_s >= span()[0]);
  at("charts").replaceChildren(...charts(known).map((one) => chart(one, times, span(), shown, Math.max(0, chosen))));
  list(shown);
}

function charts(known) {
  const of = (value) => known.map((one) => one ? value(one) ?? null : null);
  const rate = (name) => of((one) => one[name] / length);
  const line = (name, values) => ({ name, values });
  const times = (field, what) => ({
    lines: [50, 90, 99].map((part) => line(`p${part}`, of((one) => one[field]?.[`p${part}`]))),
    note: of((one) => one[field] ? `of ${one[field].count} ${what}${one[field].count === 1 ? "" : "s"}` : null), show: ms, most: 1,
  });
  const number = (value) => value >= 100 ? String(Math.round(value)) : String(Math.round(10 * value) / 10);
  const perSecond = (value) => `${number(value)}/s`;
  return [
    { title: "Requests", about: "answered, refused, and placed again after a node was lost", show: perSecond, most: 1,
      lines: [line("answered", rate("answered")), line("refused", rate("refused")), line("again", rate("resumed"))] },
    { title: "Tokens", about: "tokens of prompts, found or computed, and of answers", show: perSecond, most: 10,
      lines: [line("prompts", rate("prompt_tokens")), line("answers", rate("output_tokens"))] },
    { title: "Time to first token (TTFT)", about: "50, 90 and 99 % of the requests took no longer", ...times("ttft", "request") },
    { title: "Time between tokens (TBT)", about: "50, 90 and 99 % of the gaps were no longer", ...times("tbt", "gap") },
    { title: "Queue", about: "the most requests that were seen on all nodes during five seconds", show: number, most: 2,
      lines: [line("running", of((one) => one.running)), line("waiting", of((one) => one.waiting))] },
    { title: "KV found instead of computed", about: "share of the prompts' tokens (hit rate)", show: (value) => `${Math.round(value)} %`, most: 100,
      lines: [line("of prompt tokens", of((one) => one.prompt_tokens ? 100 * one.found_tokens / one.prompt_tokens : null))] },
    { title: "Bytes between nodes", about: "by rail: one way between two nodes", show: (value) => `${bytes(value)}/s`, most: 1024, unit: 1024, lines: rails(known) },
    { title: "Tiers in use", about: "KV arenas: blocks that requests hold and blocks that are kept for later ones", show: (value) => `${Math.round(value)} %`, most: 100,
      lines: Object.entries(TIERS).filter(([tier]) => known.some((one) => one?.tiers[tier]))
        .map(([tier, name]) => line(name, of((one) => one.tiers[tier]?.[1] ? 100 * one.tiers[tier][0] / one.tiers[tier][1] : null))) },
  ];
}

/** The rails that moved most, and the sum of the others. */
function rails(known) {
  const sums = new Map();
  for (const one of known) for (const [name, moved] of Object.entries(one?.rails ?? {})) sums.set(name, (sums.get(name) ?? 0) + moved);
  const names = [...sums.keys()].sort((a, b) => sums.get(b) - sums.get(a));
  const first = names.slice(0, MAX_RAILS), rest = names.slice(MAX_RAILS);
  const rate = (one, some) => one ? some.reduce((sum, name) => sum + (one.rails[name] ?? 0), 0) / length : null;
  const lines = first.map((name) => ({ name, values: known.map((one) => rate(one, [name])) }));
  if (rest.length) lines.push({ name: `${rest.length} more`, values: known.map((one) => rate(one, rest)) });
  return lines.length ? lines : [{ name: "all", values: known.map((one) => rate(one, [])) }];
}

function list(shown) {
  const clock = (t) => new Date(1000 * t).toLocaleTimeString([], { hour12: false });
  const rows = shown.slice(-8).reverse().map((mark) => element("li", {}, element("i", { class: `mark-${mark.kind}` }), `${clock(mark.unix_s)} ${mark.node_id} ${mark.text}`));
  at("marks").replaceChildren(...(rows.length ? [element("ul", { class: "marks", "aria-label": "faults, members and roles" }, rows)] : []));
}
