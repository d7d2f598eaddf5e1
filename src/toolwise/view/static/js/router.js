// Why this route: its odds, the prices, what each route cost and earned on this task, and λ over time.
import { html, useMemo } from "./lib.js";
import { useData } from "./api.js";
import { Chart, Scatter, colour, runColour } from "./charts.js";
import { formatNumber, formatSigned, SafeText, visibleText } from "./format.js";
import { linkTo } from "./route.js";
import { RolloutTabs } from "./rollout.js";

export function RouterPage({ params }) {
  const run = params.run ?? "0";
  const where = { run, file: params.file ?? "", id: params.id ?? "" };
  const { data, error, fits } = useData("router", where);
  const { data: rollout } = useData("rollout", where);
  const { data: overview } = useData("overview", { run });
  const names = (overview?.metric_names ?? []).filter((name) => /\/lambda$/.test(name) || /^router\/[^/]+\/(mean|budget)$/.test(name));
  const { data: series } = useData("series", names.length ? { run, names: names.join("|") } : null);
  if (error) return html`<p class="error">${error}</p>`;
  if (!data || !fits || !rollout) return html`<p class="empty">Loading …</p>`;
  const row = rollout.row;
  const head = html`<nav class="crumbs"><a href=${linkTo("rollouts", { run })}>Rollouts</a> › <a href=${linkTo("rollout", where)}><${SafeText} text=${row.rollout_id} /></a></nav>
    <h1 class="question" dir="auto"><${SafeText} text=${row.question} /></h1><nav class="tabs" aria-label="Views of this rollout"><${RolloutTabs} page="router" run=${run} row=${row} /></nav>`;
  if (!data.chosen && !data.turns.length) return html`${head}<p class="empty">This rollout was not routed.</p>`;
  const line = (name, index) => ({ label: name, ...(series?.[name] ?? { steps: [], values: [] }), colour: runColour(index) });
  return html`${head}
    <div class="grid two"><section class="card"><h2>Odds</h2>${data.turns.length && !data.odds.length ? html`<p class="muted">A route is chosen at every turn: see below.</p>` : html`<${Odds} odds=${data.odds} chosen=${data.chosen} />`}
        <p class="note">${data.log_prob !== null && `Chosen with probability ${formatNumber(Math.exp(data.log_prob))}.`} ${data.reward !== null && `Reward after costs ${formatNumber(data.reward)},`} ${data.advantage !== null && html`advantage of the route <b class=${data.advantage > 0 ? "good" : "bad"}>${formatSigned(data.advantage)}</b>.`} ${data.answered_by && `Answered by ${data.answered_by}.`}</p></section>
      <section class="card"><h2>What each route cost and earned on this task</h2><${RouteTable} rows=${data.task} chosen=${data.chosen} /></section>
      <section class="card"><h2>Score against cost</h2><${RouteScatter} data=${data} /></section>
      <section class="card"><h2>Prices</h2><${Prices} prices=${data.prices} /></section></div>
    ${data.turns.length > 0 && html`<section class="card"><h2>Turn by turn</h2>${data.turns.map((turn, index) => html`<div data-turn=${index}><h3>turn ${index}: ${visibleText(turn.route)} ${turn.advantage !== null && turn.advantage !== undefined && html`<small>A ${formatSigned(turn.advantage)}</small>`}</h3><${Odds} odds=${turn.odds} chosen=${turn.route} /></div>`)}</section>`}
    <div class="grid charts"><${Chart} title="λ over time" zero lines=${names.filter((name) => /lambda$/.test(name)).map(line)} /><${Chart} title="Spending" zero lines=${[...names.filter((name) => /\/mean$/.test(name)).map(line), ...names.filter((name) => /\/budget$/.test(name)).map((name, index) => ({ ...line(name, index), dash: [3, 3] }))]} /></div>
    ${!names.length && html`<p class="note">No λ: the router of this run has no budget.</p>`}`;
}

function Odds({ odds, chosen }) {
  if (!odds.length) return html`<p class="muted">No odds are stored: the route was given.</p>`;
  return html`<table class="figures odds"><tbody>${odds.map((one) => html`<tr class=${one.route === chosen ? "on" : ""} data-route=${one.route}><td>${visibleText(one.route)}${one.route === chosen ? " ✓" : ""}</td><td><span class="bar"><i class="after" style=${{ width: `${100 * (one.p ?? 0)}%` }}></i></span></td><td class="number" data-p=${one.p}>${one.p === null ? "does not apply" : `${(100 * one.p).toFixed(1)} %`}</td></tr>`)}</tbody></table>`;
}

function RouteTable({ rows, chosen }) {
  const side = (n, score, cost) => (n ? html`<td class="number">${n}</td><td class="number">${formatNumber(score)}</td><td class="number">${formatNumber(cost, 2)}</td>` : html`<td class="muted" colspan="3">not tried</td>`);
  return html`<div class="scroll"><table class="figures"><thead><tr><th></th><th colspan="3">in this step</th><th colspan="3">in the whole run</th></tr><tr><th>route</th>${[1, 2].map(() => html`<th class="number">rollouts</th><th class="number">score</th><th class="number">cost</th>`)}</tr></thead><tbody>
    ${rows.map((row) => html`<tr class=${row.route === chosen ? "on" : ""} data-tried=${row.route}><td>${visibleText(row.route) || "none"}</td>${side(row.n, row.score, row.cost)}${side(row.n_run, row.score_run, row.cost_run)}</tr>`)}</tbody></table></div><p class="note">Means over the rollouts of this task that took the route.</p>`;
}

function RouteScatter({ data }) {
  const [points, line] = useMemo(() => {
    const task = data.task.filter((row) => row.n).map((row) => ({ x: row.cost, y: row.score, label: `${visibleText(row.route)}, this task`, big: true, size: 6, colour: colour(row.route === data.chosen ? "good" : "accent") }));
    const all = data.run.map((row) => ({ x: row.cost, y: row.score, label: `${visibleText(row.route)}, whole run`, colour: colour("muted"), big: true, size: 8 }));
    const curve = (data.frontier?.curves?.router ?? []).map((point) => ({ x: point.cost?.value, y: point.score?.value })).filter((point) => Number.isFinite(point.x) && Number.isFinite(point.y)).sort((a, b) => a.x - b.x);
    return [[...all, ...task], curve]; // those of the task above the others
  }, [data]);
  return html`<${Scatter} points=${points} line=${line} x="cost" y="score" height=${240} /><p class="note">Grey: all rollouts of the route in this run.${line.length ? " Line: the router's frontier." : ""}</p>`;
}

function Prices({ prices }) {
  const rows = [...Object.entries(prices.tools), ...Object.entries(prices.prices).flatMap(([unit, table]) => Object.entries(table).map(([name, price]) => [`${name}, ${unit}`, price]))];
  return html`<p>The router pays by <b>${prices.cost ?? "–"}</b>${prices.budgets.map((one) => html`, at most <b>${formatNumber(one.limit, 2)}</b> ${one.unit ?? "cost"} a question on average`)}.</p>
    ${rows.length > 0 ? html`<table class="figures"><tbody>${rows.map(([name, price]) => html`<tr><td>${name}</td><td class="number">${formatNumber(price, 2)}</td></tr>`)}</tbody></table>` : html`<p class="muted">Every call has the price of its tool, 1 unless it says otherwise.</p>`}`;
}
