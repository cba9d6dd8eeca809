// One small chart over the last minutes: lines with gaps where nothing is known, and marks.

import { element } from "./dom.js";

const WIDTH = 320, HEIGHT = 96, TOP = 14, BOTTOM = 15;

/** The x of a moment, as a share of the width: 0 is the left end of `span` = [begin, end] in unix seconds. */
const share = (t, [begin, end]) => (t - begin) / (end - begin);

/** The moment below a pointer at `clientX` over the chart. */
export function momentAt(svg, clientX, [begin, end]) {
  const box = svg.getBoundingClientRect();
  return begin + (end - begin) * Math.min(1, Math.max(0, (clientX - box.left) / box.width));
}

/**
 * {title, about, show: value => text, most: least top of the scale, lines: [{name, values}], note: text per moment}
 * values[i] is that of times[i]; null leaves a gap. at: the index whose values are written, in [0, times.length).
 * unit: 1024 for bytes.
 */
export function chart({ title, about, show, most, lines, note, unit = 1 }, times, span, marks, at) {
  const top = ceiling(Math.max(most, ...lines.flatMap((line) => line.values.filter((value) => value !== null))), most, unit);
  const x = (t) => (WIDTH * share(t, span)).toFixed(1);
  const y = (value) => (HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / top).toFixed(1);
  const svg = element("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${spoken(lines, show)}` });
  for (const value of [0, top / 2, top]) svg.append(element("line", { class: "axis", x1: 0, x2: WIDTH, y1: y(value), y2: y(value) }));
  for (const mark of marks) {
    svg.append(element("line", { class: `mark ${mark.kind}`, x1: x(mark.unix_s), x2: x(mark.unix_s), y1: TOP, y2: HEIGHT - BOTTOM },
      element("title", {}, `${mark.node_id} ${mark.text}`)));
  }
  svg.append(element("line", { class: "cursor", x1: x(times[at]), x2: x(times[at]), y1: TOP - 6, y2: HEIGHT - BOTTOM }));
  lines.forEach((line, i) => svg.append(...pieces(line.values).map((piece) => piece.length === 1
    ? element("circle", { class: `dot-${i}`, cx: x(times[piece[0]]), cy: y(line.values[piece[0]]), r: 1.6 })
    : element("polyline", { class: `line-${i}`, points: piece.map((k) => `${x(times[k])},${y(line.values[k])}`).join(" ") }))));
  svg.append(element("text", { class: "tick", x: 1, y: TOP - 4 }, show(top)));
  const minutes = Math.round((span[1] - span[0]) / 60);
  svg.append(element("text", { class: "tick", x: 1, y: HEIGHT - 3 }, `${minutes} min ago`), element("text", { class: "tick", x: WIDTH - 1, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
  const legend = lines.map((line, i) => element("span", {}, element("i", { class: `fill-${i}` }), `${line.name} `, element("b", {}, line.values[at] === null ? "–" : show(line.values[at]))));
  const said = note?.[at] ? element("span", { class: "soft" }, note[at]) : null;
  return element("figure", { class: "card" }, element("figcaption", { title: about }, title), svg, element("div", { class: "legend" }, legend, said));
}

/** Runs of indices whose values are known. */
function pieces(values) {
  const found = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i && values[i - 1] !== null) found.at(-1).push(i);
    else found.push([i]);
  });
  return found;
}

/** The next 1, 2 or 5 times a power of ten of the unit (of its powers: KiB, MiB, ...), and at least `most`. */
function ceiling(value, most, unit) {
  if (value <= most) return most;
  const whole = unit > 1 ? unit ** Math.floor(Math.log(value) / Math.log(unit)) : 1;
  const power = whole * 10 ** Math.floor(Math.log10(value / whole));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= value * 0.999);
}

function spoken(lines, show) {
  return lines.map((line) => {
    const known = line.values.filter((value) => value !== null);
    return known.length ? `${line.name} now ${show(known.at(-1))}, at most ${show(Math.max(...known))}` : `${line.name} unknown`;
  }).join("; ");
}
