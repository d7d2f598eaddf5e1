// Curves over training steps, and scatter plots, in the colours of the page.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState, useContext, createContext, UPlot } from "./lib.js";
import { formatNumber } from "./format.js";

export const Theme = createContext("light");

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function runColour(number) {
  return colour(`run-${number % 6}`);
}

function alignSteps(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const columns = lines.map((line) => {
    const column = new Array(steps.length).fill(undefined);
    line.steps.forEach((step, index) => { column[place.get(step)] = line.values[index]; });
    return column;
  });
  return [steps, ...columns];
}

// Round numbers between two bounds, and how many decimals they have.
export function roundTicks(low, high, count = 5) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw * 0.999);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return [Array.from({ length: Math.max(0, last - first + 1) }, (_, index) => (first + index) * step), digits];
}

// The border that stands for a dash in a legend.
function dashStyle(dash) {
  return dash === undefined ? "solid" : dash.length > 2 ? "double" : dash[0] < 4 ? "dotted" : "dashed";
}

function latest(values) {
  return values.findLast((value) => value !== null && value !== undefined);
}

// lines: {label, steps, values, colour, dash, fill, points, low, high, unnamed}; low and high mark the edges of a band,
// which the legend leaves out if they are unnamed.
// The legend shows the latest values until the pointer is on the chart.
export function Chart({ title, lines, height = 190, unit = "", note = "", zero = false }) {
  const box = useRef(null);
  const theme = useContext(Theme);
  const shown = lines.filter((line) => line.steps.length);
  useLayoutEffect(() => {
    if (!box.current || !shown.length) return undefined;
    const axis = { stroke: colour("muted"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui", size: 44 };
    const bands = [];
    shown.forEach((line, index) => {
      if (line.high) bands.push({ series: [index + 1, shown.findIndex((other) => other.low === line.high) + 1], fill: line.bandFill });
    });
    const chart = new UPlot({
      width: box.current.clientWidth, height,
      scales: { x: { time: false }, y: { range: (_, low, high) => padRange(low, high, zero) } },
      legend: { live: true, markers: { dash: (_, index) => dashStyle(shown[index - 1]?.dash) } },
      cursor: { sync: { key: "steps" }, points: { size: 6 } },
      axes: [{ ...axis, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] }, { ...axis, values: (_, ticks) => ticks.map((tick) => formatNumber(tick, 2)) }],
      bands,
      series: [{ label: "step", value: (_, value, __, index) => (index === null || index === undefined ? "latest" : value) }, ...shown.map((line) => ({
        label: line.label, class: line.high || line.low ? (line.unnamed ? "unnamed" : "band") : null, stroke: line.colour, width: line.width ?? 1.8, dash: line.dash, fill: line.fill, spanGaps: true,
        points: { show: line.points ?? line.steps.length === 1, size: 5 }, value: (_, value, __, index) => formatNumber(index === null || index === undefined ? latest(line.values) : value), show: true,
      }))],
    }, alignSteps(shown), box.current);
    box.current.chart = chart;
    const watch = new ResizeObserver(() => box.current && chart.setSize({ width: box.current.clientWidth, height }));
    watch.observe(box.current);
    return () => { watch.disconnect(); chart.destroy(); };
  }, [theme, JSON.stringify(shown.map((line) => [line.label, line.colour, line.dash, line.steps.length, line.steps.at(-1), line.values.at(-1)]))]);
  if (!shown.length) return null;
  return html`<figure class="card chart" data-title=${title}><figcaption>${title} ${unit && html`<small>${unit}</small>`}</figcaption><div ref=${box}></div>${note && html`<p class="note">${note}</p>`}</figure>`;
}

function padRange(low, high, zero) {
  if (low === null || low === undefined) return [0, 1];
  const least = zero ? Math.min(0, low) : low;
  const pad = (high - least) * 0.08 || Math.abs(high) * 0.1 || 0.5;
  return [zero && least >= 0 ? 0 : least - pad, high + pad];
}

// points: {x, y, colour, label, big}; one that is clicked is given to onPick.
export function Scatter({ points, x, y, height = 300, onPick, line }) {
  const canvas = useRef(null), hint = useRef(null);
  const theme = useContext(Theme);
  const nearest = (event) => {
    const bounds = canvas.current.getBoundingClientRect();
    let best = null, least = 144;
    for (const [px, py, point] of canvas.current.places || []) {
      const distance = (px - event.clientX + bounds.left) ** 2 + (py - event.clientY + bounds.top) ** 2;
      if (distance < least) [best, least] = [point, distance];
    }
    return best;
  };
  const tell = (point) => { hint.current.textContent = point ? `${point.label || ""} ${x} ${formatNumber(point.x)}, ${y} ${formatNumber(point.y)}` : ""; };
  const move = (event) => {
    const point = nearest(event);
    tell(point);
    canvas.current.style.cursor = point && onPick ? "pointer" : "default";
  };
  // By keyboard: from point to point, from left to right.
  const [at, setAt] = useState(-1);
  const ordered = useMemo(() => points.filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y)).sort((a, b) => a.x - b.x || a.y - b.y), [points]);
  useEffect(() => setAt(-1), [points]);
  useEffect(() => { if (ordered[at]) tell(ordered[at]); }, [at]);
  const pressed = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) { event.preventDefault(); setAt(Math.max(0, Math.min(ordered.length - 1, at + by))); }
    else if (event.key === "Enter" && ordered[at] && onPick) { event.stopPropagation(); onPick(ordered[at]); }
  };
  useEffect(() => {
    const draw = () => drawScatter(canvas.current, points, x, y, height, line, ordered[at]);
    draw();
    const watch = new ResizeObserver(draw);
    watch.observe(canvas.current.parentElement);
    return () => watch.disconnect();
  }, [theme, points, x, y, line, at]);
  const pick = (event) => { const point = nearest(event); if (point && onPick) onPick(point); };
  return html`<div class="scatter"><canvas ref=${canvas} role="img" tabindex="0" aria-label=${`${y} against ${x}, ${points.length} points; left and right go from point to point${onPick ? ", Enter opens it" : ""}`} onKeyDown=${pressed} onMouseMove=${move} onClick=${pick}></canvas><p class="note" ref=${hint} aria-live="polite"></p></div>`;
}

function drawScatter(canvas, points, x, y, height, line, current) {
  const ratio = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  const known = [...points, ...(line || [])].filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y));
  if (!known.length) return;
  const span = (name) => {
    const values = known.map((point) => point[name]);
    return padRange(values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b)), false);
  };
  const [left, right] = span("x"), [low, high] = span("y");
  const placeX = (value) => 52 + ((value - left) / (right - left)) * (width - 66);
  const placeY = (value) => height - 34 - ((value - low) / (high - low)) * (height - 60);
  pen.font = "11px system-ui";
  pen.fillStyle = colour("muted");
  pen.strokeStyle = colour("grid");
  const [ticksX, digitsX] = roundTicks(left, right, Math.min(8, width / 90)), [ticksY, digitsY] = roundTicks(low, high);
  pen.textAlign = "right";
  for (const value of ticksY) {
    pen.beginPath();
    pen.moveTo(52, placeY(value));
    pen.lineTo(width - 14, placeY(value));
    pen.stroke();
    pen.fillText(formatNumber(value, digitsY), 46, placeY(value) + 4);
  }
  pen.textAlign = "center";
  for (const value of ticksX) pen.fillText(formatNumber(value, digitsX), placeX(value), height - 18);
  pen.fillText(x, width / 2, height - 3);
  pen.textAlign = "left";
  pen.fillText(y, 2, 11);
  if (line?.length) {
    pen.strokeStyle = colour("accent");
    pen.beginPath();
    line.forEach((point, index) => pen[index ? "lineTo" : "moveTo"](placeX(point.x), placeY(point.y)));
    pen.stroke();
  }
  canvas.places = known.filter((point) => !line?.includes(point)).map((point) => [placeX(point.x), placeY(point.y), point]);
  const labels = [];
  for (const [px, py, point] of canvas.places) {
    pen.fillStyle = point.colour || colour("accent");
    pen.globalAlpha = point.big ? 1 : 0.55;
    pen.beginPath();
    pen.arc(px, py, point.size ?? 3, 0, 7);
    pen.fill();
    if (point.big && point.label) labels.push([px, py, point.label]);
  }
  pen.globalAlpha = 1;
  const ring = canvas.places.find(([, , point]) => point === current);
  if (ring) {
    pen.strokeStyle = colour("text");
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(ring[0], ring[1], (current.size ?? 3) + 4, 0, 7);
    pen.stroke();
  }
  drawLabels(pen, labels, width);
}

// Names beside their points, moved up or down until none covers another.
function drawLabels(pen, labels, width) {
  const placed = [];
  pen.fillStyle = colour("text");
  pen.textAlign = "left";
  for (const [px, py, label] of labels) {
    const size = pen.measureText(label).width;
    const left = px + 13 + size > width ? Math.max(0, px - 13 - size) : px + 13;
    const free = (y) => !placed.some((box) => Math.abs(box.y - y) < 13 && box.left < left + size && left < box.left + box.size);
    const y = [0, -13, 13, -26, 26, -39, 39].map((by) => py + 4 + by).find((one) => one > 22 && free(one)) ?? py + 4;
    placed.push({ left, y, size });
    pen.fillText(label, left, y);
  }
}
