// A picture of the cluster: nodes on an ellipse, so that no line between two of them crosses a third one.

import { bytes, element } from "./dom.js";

const BOX = 66, MAX_NODES = 36, MAX_LABELS = 10, MIN_WIDTH = 520, SHARES = [0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74], WAYS = { shm: "shared memory", tcp: "TCP", rdma: "RDMA" };
const ORDER = [(node) => node.roles.includes("store") && node.roles.length === 1, (node) => !node.roles.includes("decode"), (node) => node.roles.includes("prefill"), () => true];
const seen = new Map(); // pair -> {moved, t, rate}

export function drawCluster(into, live) {
  const nodes = live.nodes.slice(0, MAX_NODES).map((node) => ({ ...node, rank: ORDER.findIndex((is) => is(node)) })).sort((a, b) => a.rank - b.rank);
  const width = Math.max(280, into.clientWidth - 30), wide = Math.min(156, width / 2.25);
  const height = BOX + (nodes.length > 2 ? Math.max(170, 60 * nodes.length) : 20);
  place(nodes, width, height, wide);
  const links = pairs(live, nodes);
  const svg = element("svg", { class: "cluster", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${nodes.length} nodes, ${links.length} connections` });
  for (const link of links) svg.append(line(link));
  const taken = nodes.map((node) => around(node.x, node.y, wide + 2, BOX + 2)), without = [];
  for (const link of links.length <= MAX_LABELS ? links : []) {
    const written = width >= MIN_WIDTH && label(link, taken);
    if (written) svg.append(written); else without.push(link);
  }
  for (const node of nodes) svg.append(box(node, wide));
  const more = live.nodes.length - nodes.length;
  const list = without.map((link) => element("div", { class: "soft" }, `${link.from.node_id} – ${link.to.node_id}: ${told(link)}`));
  into.replaceChildren(svg, ...list, ...(more > 0 ? [element("p", { class: "soft" }, `${more} more nodes are not in the picture`)] : []));
}

/** Adds x and y of the middle: stores at the bottom, then clockwise prefill, both, decode. */
function place(nodes, width, height, wide) {
  const group = nodes.filter((node) => node.rank === nodes[0].rank).length % nodes.length; // 0: all nodes are alike
  const middle = group && nodes[0].rank === 0 ? Math.PI / 2 : Math.PI; // of the first group
  const angles = nodes.map((_, i) => middle + 2 * Math.PI * (i - (Math.max(1, group) - 1) / 2) / nodes.length);
  const xs = spread(angles.map(Math.cos), wide / 2 + 2, width - wide / 2 - 2);
  const ys = spread(angles.map(Math.sin), BOX / 2 + 2, height - BOX / 2 - 2);
  nodes.forEach((node, i) => { node.x = xs[i]; node.y = ys[i]; });
}

/** The values scaled so that they reach from `low` to `high`. */
function spread(values, low, high) {
  const least = Math.min(...values), most = Math.max(...values);
  return values.map((value) => most - least < 1e-9 ? (low + high) / 2 : low + (high - low) * (value - least) / (most - least));
}

/** One link for the paths of both directions: {from, to, ways, moved, rate in bytes/s}. */
function pairs(live, nodes) {
  const known = new Map(nodes.map((node) => [node.node_id, node])), found = new Map();
  for (const node of nodes) for (const path of node.paths ?? []) {
    const other = known.get(path.peer);
    if (!other || other === node) continue; // copies within a node
    const key = JSON.stringify([node.node_id, path.peer].sort());
    const link = found.get(key) ?? { key, from: node, to: other, ways: new Set(), moved: 0 };
    if (path.transport) link.ways.add(WAYS[path.transport] ?? path.transport);
    link.moved += path.bytes_read + path.bytes_written;
    found.set(key, link);
  }
  for (const link of found.values()) {
    const before = seen.get(link.key);
    const passed = before ? live.unix_s - before.t : 0;
    link.rate = passed > 0 ? Math.max(0, link.moved - before.moved) / passed : before?.rate ?? 0;
    if (!before || passed > 0) seen.set(link.key, { moved: link.moved, t: live.unix_s, rate: link.rate });
  }
  return [...found.values()];
}

const told = (link) => `${[...link.ways].join(" and ") || "closed"}, ${link.rate ? `${bytes(link.rate)}/s` : `${bytes(link.moved)} moved`}`;

function line(link) {
  const thick = link.rate ? Math.min(8, 2 + Math.log2(1 + link.rate / (1 << 20)) / 1.5) : 1.5;
  return element("line", { class: `link${link.rate ? " busy" : ""}${link.ways.size ? "" : " closed"}`, x1: link.from.x, y1: link.from.y, x2: link.to.x, y2: link.to.y, "stroke-width": thick },
    element("title", {}, `${link.from.node_id} and ${link.to.node_id}: ${told(link)}`));
}

const around = (x, y, wide, high) => ({ left: x - wide / 2, right: x + wide / 2, top: y - high / 2, bottom: y + high / 2 });
const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;

/** At the first free place on the line; `taken` are the boxes that are not free. Null if there is no such place. */
function label(link, taken) {
  const [way, figure] = told(link).split(", ");
  const wide = 6.3 * Math.max(way.length, figure.length) + 4;
  for (const share of SHARES) {
    const x = link.from.x + (link.to.x - link.from.x) * share, y = link.from.y + (link.to.y - link.from.y) * share;
    const place = around(x, y + 2, wide, 31);
    if (taken.some((other) => meet(place, other))) continue;
    taken.push(place);
    return element("g", {}, element("text", { class: "on-link", x, y: y - 2 }, way), element("text", { class: "on-link soft", x, y: y + 13 }, figure));
  }
  return null;
}

function box(node, wide) {
  const fine = node.status === "alive" && !node.error;
  const x = node.x - wide / 2 + 10, y = node.y - BOX / 2;
  const does = node.load?.does?.length && node.load.does.length < node.roles.filter((role) => role !== "store").length ? `now ${node.load.does.join(", ")}` : node.roles.join(", ");
  const third = !fine ? (node.error ? "no answer" : node.status) : node.loading ?? (node.load ? `${node.load.running} running, ${node.load.waiting} waiting` : "keeps blocks");
  return element("g", {}, element("title", {}, node.error ?? `${node.node_id}: ${node.status}`),
    element("rect", { class: fine ? "node" : "node bad", x: node.x - wide / 2, y, width: wide, height: BOX, rx: 9 }),
    element("text", { class: "name", x, y: y + 22 }, shorten(node.node_id, wide, 7.2)), element("text", { class: "soft", x, y: y + 39 }, shorten(does, wide)), element("text", { class: fine ? "" : "bad", x, y: y + 55 }, shorten(third, wide)));
}

/** advance: mean width of a character in pixels. */
const shorten = (text, wide, advance = 6.4) => text.length * advance > wide - 8 ? `${text.slice(0, Math.floor((wide - 20) / advance))}…` : text;
