// The table of rollouts: filters, sorting, search, and a scatter plot of any two columns.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./lib.js";
import { useData } from "./api.js";
import { Scatter, colour } from "./charts.js";
import { Choice, formatNumber, formatSigned, markOf, SafeText, visibleText } from "./format.js";
import { goTo, linkTo } from "./route.js";

const PAGE = 50;
const COLUMNS = [["step", "step"], ["kind", "kind", "wide"], ["question", "question"], ["route", "route", "wide"], ["score", "score", "number"], ["correct", ""], ["cost", "cost", "number"], ["tokens", "tokens", "number wide"], ["calls", "calls", "number wide"], ["advantage", "advantage", "number wide"], ["stop_reason", "ended", "wide"]];
const NUMBER_COLUMNS = ["step", "score", "cost", "advantage", "steps", "tokens", "calls", "failed_calls"];
const CONTROL = ["sort", "desc", "offset", "scatter", "x", "y", "run", "limit"];

export function filtersOf(params) {
  return Object.fromEntries(Object.entries(params).filter(([name]) => !CONTROL.includes(name)));
}

export function RolloutsPage({ params }) {
  const run = params.run ?? "0";
  const filters = filtersOf(params);
  const query = { run, limit: PAGE, ...filters, sort: params.sort ?? "", desc: params.desc ?? "", offset: params.offset ?? "0" };
  const { data, error, loading } = useData("rollouts", query);
  const { data: facets } = useData("facets", { run });
  const [cursor, setCursor] = useState(-1);
  const set = (changes) => goTo("rollouts", { ...params, offset: "", ...changes }, true);
  const table = useRef(null);
  const rows = data?.rows ?? [];
  const open = (row) => goTo("rollout", { run, file: row.file, id: row.rollout_id });
  useLayoutEffect(() => setCursor(-1), [JSON.stringify(query)]);
  useLayoutEffect(() => {
    const pressed = (event) => {
      if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "j" || event.key === "k") {
        setCursor((now) => Math.max(0, Math.min(rows.length - 1, now + (event.key === "j" ? 1 : -1))));
      } else if (event.key === "Enter" && rows[cursor] && !event.target.closest("a, button")) open(rows[cursor]);
      else if (event.key === "n") turn(1);
      else if (event.key === "p") turn(-1);
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  });
  useEffect(() => { table.current?.querySelector("tr.cursor")?.scrollIntoView({ block: "nearest" }); }, [cursor]);
  const offset = Number(params.offset || 0);
  const turn = (pages) => {
    const next = offset + pages * PAGE;
    if (next >= 0 && next < (data?.total ?? 0)) goTo("rollouts", { ...params, offset: next || "" }, true);
  };
  const sortBy = (name) => set(params.sort === name ? { desc: params.desc === "true" ? "" : "true" } : { sort: name, desc: ["score", "cost", "tokens", "calls", "advantage", "step"].includes(name) ? "true" : "" });
  return html`<h1>Rollouts</h1>
    <${Filters} facets=${facets} params=${params} set=${set} />
    ${error && html`<p class="error">${error}</p>`}
    <div class="table-head"><span data-total=${data?.total}>${data ? html`<b>${data.total.toLocaleString("en-US")}</b> of ${data.of.toLocaleString("en-US")} rollouts` : "Loading …"}${loading && data ? " …" : ""}</span>
      <button class=${`chip ${params.scatter ? "on" : ""}`} aria-pressed=${Boolean(params.scatter)} onClick=${() => set({ scatter: params.scatter ? "" : "1" })}>scatter plot</button>
      <span class="pager"><button onClick=${() => turn(-1)} disabled=${offset <= 0} aria-label="previous page">‹</button>
        ${data ? `${data.total ? offset + 1 : 0}–${Math.min(offset + PAGE, data.total)}` : ""}
        <button onClick=${() => turn(1)} disabled=${!data || offset + PAGE >= data.total} aria-label="next page">›</button></span></div>
    ${params.scatter && html`<${ScatterPanel} run=${run} reported=${(!window.TOOLWISE_BUNDLE && facets?.reward_metrics) || []} params=${params} filters=${filters} set=${set} />`}
    <div class="scroll card flush" ref=${table}><table class="rollouts"><thead><tr>${COLUMNS.map(([name, label, kind = ""]) => html`<th class=${kind} aria-sort=${params.sort === name ? (params.desc === "true" ? "descending" : "ascending") : "none"}>
        <button class="link" onClick=${() => sortBy(name)}>${label || "✓"}${params.sort === name ? (params.desc === "true" ? " ↓" : " ↑") : ""}</button></th>`)}</tr></thead>
      <tbody>${rows.map((row, index) => html`<tr key=${`${row.file} ${row.rollout_id}`} class=${index === cursor ? "cursor" : ""} onClick=${(event) => event.target.closest("a") || open(row)}>
        <td class="number"><span class=${`phase ${row.phase}`}>${row.phase === "eval" ? "eval " : ""}${row.step}</span></td>
        <td class="wide word" title=${visibleText(row.kind)}>${visibleText(row.kind)}</td>
        <td class="question"><a href=${linkTo("rollout", { run, file: row.file, id: row.rollout_id })}><${SafeText} text=${row.question || row.rollout_id} /></a></td>
        <td class="wide word" title=${visibleText(row.route)}>${visibleText(row.route)}</td><td class="number">${formatNumber(row.score)}</td><td>${markOf(row.correct)}</td><td class="number">${formatNumber(row.cost, 2)}</td>
        <td class="number wide">${row.tokens}</td><td class="number wide">${row.calls}${row.failed_calls ? html`<span class="bad" title="failed calls"> ${row.failed_calls}!</span>` : ""}</td>
        <td class=${`number wide ${row.advantage > 0 ? "good" : row.advantage < 0 ? "bad" : ""}`}>${row.trained_on ? formatSigned(row.advantage) : ""}</td>
        <td class=${`wide word ${row.fault ? "bad" : ""}`}>${visibleText(row.stop_reason)}</td></tr>`)}</tbody></table>
      ${data && !rows.length && html`<p class="empty">Nothing fits these filters.</p>`}</div>`;
}

function Filters({ facets, params, set }) {
  const words = facets?.words ?? {};
  const choice = (name, label, values) => values?.length > 0 && html`<${Choice} label=${label} value=${params[name]} options=${[["", "any"], ...values.map(([value, count]) => [value, `${visibleText(value)} (${count.toLocaleString("en-US")})`])]} onChange=${(value) => set({ [name]: value })} />`;
  const flag = (name, label, yes, no) => html`<${Choice} label=${label} value=${params[name]} options=${[["", "any"], ["true", yes], ["false", no]]} onChange=${(value) => set({ [name]: value })} />`;
  const active = Object.keys(filtersOf(params)).length;
  const [cleared, setCleared] = useState(0); // a new search box: text that is not searched for yet goes too
  const clear = () => {
    setCleared(cleared + 1);
    goTo("rollouts", { run: params.run, sort: params.sort, desc: params.desc, scatter: params.scatter }, true);
  };
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()} role="search">
    <${SearchBox} key=${cleared} value=${params.q ?? ""} onSearch=${(q) => set({ q })} />
    ${choice("phase", "phase", words.phase)} ${choice("kind", "kind", words.kind)} ${choice("route", "route", words.route)} ${choice("tool", "tool", facets?.tools)} ${choice("stop_reason", "ended", words.stop_reason)}
    ${flag("correct", "correct", "yes", "no")} ${flag("trained_on", "trained on", "yes", "no")}
    ${["step", "score", "cost"].map((name) => html`<${RangeFilter} name=${name} params=${params} set=${set} range=${facets?.ranges[name]} />`)}
    ${params.fault && html`<button type="button" class="chip on" onClick=${() => set({ fault: "" })}>with a fault ×</button>`}
    ${["task_id", "group_id", "file"].filter((name) => params[name]).map((name) => html`<button type="button" class="chip on" onClick=${() => set({ [name]: "" })}>${name}: ${visibleText(params[name])} ×</button>`)}
    ${active > 0 && html`<button type="button" class="link" onClick=${clear}>clear filters</button>`}</form>`;
}

let focusWanted = false;

// Puts the cursor into the search box, of a page that is still to come too.
export function focusSearch() {
  const box = document.getElementById("search");
  focusWanted = !box;
  box?.focus();
}

function SearchBox({ value, onSearch }) {
  const [text, setText] = useState(value);
  const box = useRef(null), timer = useRef(null), search = useRef(onSearch);
  search.current = onSearch; // the filters may change before the timer runs
  useEffect(() => setText(value), [value]);
  useEffect(() => {
    if (focusWanted) box.current.focus();
    focusWanted = false;
    return () => clearTimeout(timer.current);
  }, []);
  const typed = (event) => {
    const next = event.target.value;
    setText(next);
    clearTimeout(timer.current);
    timer.current = setTimeout(() => search.current(next), 300);
  };
  return html`<label class="search"><span class="hidden">search text</span><input type="search" id="search" ref=${box} value=${text} onInput=${typed} placeholder="search all text  ( / )" /></label>`;
}

function RangeFilter({ name, params, set, range }) {
  if (!range || range.min === null || range.min === range.max) return null;
  const bound = (end) => html`<input type="number" step="any" aria-label=${`${name} ${end === "min" ? "at least" : "at most"}`} value=${params[`${name}_${end}`] ?? ""} placeholder=${formatNumber(range[end], 2)} onChange=${(event) => set({ [`${name}_${end}`]: event.target.value })} />`;
  return html`<span class="range">${name} ${bound("min")}–${bound("max")}</span>`;
}

function ScatterPanel({ run, reported, params, filters, set }) {
  const x = params.x || "cost", y = params.y || "score";
  const { data, error } = useData("points", { run, ...filters, x, y });
  const points = useMemo(() => {
    if (!data) return [];
    const found = data.points;
    return found.file.map((file, index) => ({
      x: found[x]?.[index], y: found[y]?.[index], file, id: found.rollout_id[index],
      size: 3, colour: found.correct[index] === true ? colour("good") : found.correct[index] === false ? colour("bad") : colour("accent"),
    }));
  }, [data]);
  const axis = (name, value) => html`<${Choice} label=${name} value=${value} options=${[...NUMBER_COLUMNS, ...reported].map((column) => [column, column])} onChange=${(column) => set({ [name]: column })} />`;
  return html`<section class="card"><div class="filters">${axis("x", x)} ${axis("y", y)} ${data && data.total > points.length && html`<span class="muted">${points.length.toLocaleString("en-US")} of ${data.total.toLocaleString("en-US")} shown</span>`}</div>
    ${error && html`<p class="error">${error}</p>`}
    <${Scatter} points=${points} x=${x} y=${y} onPick=${(point) => goTo("rollout", { run, file: point.file, id: point.id })} /></section>`;
}
