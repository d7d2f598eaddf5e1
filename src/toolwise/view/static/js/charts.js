// Curves over training steps, and scatter plots, in the colours of the page.
import { html, useEffect, useLayoutEffect, useRef, useContext, createContext, UPlot } from "./lib.js";
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

// lines: {label, steps, values, colour, dash, fill, points, low, high}; low and high mark the edges of a band.
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
      legend: { live: true },
      cursor: { sync: { key: "steps" }, points: { size: 6 } },
      axes: [{ ...axis, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000] }, { ...axis, values: (_, ticks) => ticks.map((tick) => formatNumber(tick, 2)) }],
      bands,
      series: [{ label: "step" }, ...shown.map((line) => ({
        label: line.label, stroke: line.colour, width: line.width ?? 1.8, dash: line.dash, fill: line.fill, spanGaps: true,
        points: { show: line.points ?? line.steps.length === 1, size: 5 }, value: (_, value) => formatNumber(value), show: true,
      }))],
    }, alignSteps(shown), box.current);
    const watch = new ResizeObserver(() => box.current && chart.setSize({ width: box.current.clientWidth, height }));
    watch.observe(box.current);
    return () => { watch.disconnect(); chart.destroy(); };
  }, [theme, JSON.stringify(shown.map((line) => [line.label, line.colour, line.steps.length, line.steps.at(-1), line.values.at(-1)]))]);
  if (!shown.length) return null;
  return html`<figure class="card chart"><figcaption>${title} ${unit && html`<small>${unit}</small>`}</figcaption><div ref=${box}></div>${note && html`<p class="note">${note}</p>`}</figure>`;
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
  useEffect(() => {
    const draw = () => drawScatter(canvas.current, points, x, y, height, line);
    draw();
    const watch = new ResizeObserver(draw);
    watch.observe(canvas.current.parentElement);
    return () => watch.disconnect();
  }, [theme, points, x, y, line]);
  const nearest = (event) => {
    const bounds = canvas.current.getBoundingClientRect();
    let best = null, least = 144;
    for (const [px, py, point] of canvas.current.places || []) {
      const distance = (px - event.clientX + bounds.left) ** 2 + (py - event.clientY + bounds.top) ** 2;
      if (distance < least) [best, least] = [point, distance];
    }
    return best;
  };
  const move = (event) => {
    const point = nearest(event);
    hint.current.textContent = point ? `${point.label || ""} ${x} ${formatNumber(point.x)}, ${y} ${formatNumber(point.y)}` : "";
    canvas.current.style.cursor = point && onPick ? "pointer" : "default";
  };
  const pick = (event) => { const point = nearest(event); if (point && onPick) onPick(point); };
  return html`<div class="scatter"><canvas ref=${canvas} role="img" aria-label=${`${y} against ${x}, ${points.length} points`} onMouseMove=${move} onClick=${pick}></canvas><p class="note" ref=${hint}></p></div>`;
}

function drawScatter(canvas, points, x, y, height, line) {
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
  for (let tick = 0; tick <= 4; tick += 1) {
    const [valueX, valueY] = [left + ((right - left) * tick) / 4, low + ((high - low) * tick) / 4];
    pen.beginPath();
    pen.moveTo(52, placeY(valueY));
    pen.lineTo(width - 14, placeY(valueY));
    pen.stroke();
    pen.textAlign = "right";
    pen.fillText(formatNumber(valueY, 2), 46, placeY(valueY) + 4);
    pen.textAlign = "center";
    pen.fillText(formatNumber(valueX, 2), placeX(valueX), height - 18);
  }
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
  for (const [px, py, point] of canvas.places) {
    pen.fillStyle = point.colour || colour("accent");
    pen.globalAlpha = point.big ? 1 : 0.55;
    pen.beginPath();
    pen.arc(px, py, point.big ? 6 : 3, 0, 7);
    pen.fill();
    if (point.big && point.label) {
      pen.globalAlpha = 1;
      pen.fillStyle = colour("text");
      const right = px > 0.65 * width;
      pen.textAlign = right ? "right" : "left";
      pen.fillText(point.label, px + (right ? -9 : 9), py + 4);
    }
  }
  pen.globalAlpha = 1;
}
