// The overview: what one or several runs learned, what it cost, how fast, and what went wrong.
import { html, useContext, useMemo } from "./lib.js";
import { Live, useData } from "./api.js";
import { Chart, Theme, colour, runColour } from "./charts.js";
import { Choice, formatMetric, formatNumber, formatSigned, SafeText, visibleText } from "./format.js";
import { linkTo, goTo } from "./route.js";

const THINKING_TIMES = ["time/alternatives_s", "time/level_scores_s"]; // parts of the time of an update
const CURVES = {
  correct: ["reward/correct/mean", "eval/correct"],
  score: ["score/mean", "eval/score"],
  cost: ["cost/mean", "eval/cost"],
  speed: ["time/tokens_per_s"],
  health: ["actor/entropy", "frac_zero_std", "actor/clip_frac"],
  drift: ["actor/kl", "kl/reference", "canary/logprob_gap_max"],
  loss: ["loss", "eval/loss"],
};
const DASHES = [undefined, [9, 4], [2, 4], [9, 3, 2, 3]];

// What a budget is in: "cost" of router/cost/lambda, "thinking" of thinking/lambda, "thinking tokens" of thinking/tokens/budget.
function unitOf(name) {
  return name.split("/").slice(0, -1).join(" ").replace(/^router /, "");
}

function meanOf(budget) {
  return budget.replace(/budget$/, "mean");
}

export function OverviewPage({ params }) {
  const { runs } = useContext(Live);
  const chosen = params.runs ? params.runs.split("|").filter((number) => /^\d+$/.test(number) && runs[number]) : runs.map((run) => String(run.run));
  const lead = params.run && chosen.includes(params.run) ? params.run : chosen[0] ?? "0";
  return html`
    ${runs.length > 1 && html`<${RunChooser} runs=${runs} chosen=${chosen} lead=${lead} />`}
    <${RunHeader} run=${lead} />
    <${Curves} key=${chosen.join()} chosen=${chosen} lead=${lead} params=${params} />`;
}

function RunChooser({ runs, chosen, lead }) {
  const toggle = (number) => {
    const next = chosen.includes(number) ? chosen.filter((one) => one !== number) : [...chosen, number].sort();
    goTo("overview", { runs: (next.length ? next : [number]).join("|") });
  };
  return html`<div class="chips" role="group" aria-label="Runs on the charts">${runs.map((run) => html`
    <button class=${`chip ${chosen.includes(String(run.run)) ? "on" : ""}`} aria-pressed=${chosen.includes(String(run.run))} onClick=${() => toggle(String(run.run))}>
      <i class="dot" style=${{ background: runColour(run.run) }}></i>${run.name}</button>`)}
    ${chosen.length > 1 && html`<span class="inline"><${Choice} label="figures of" value=${lead} options=${chosen.map((number) => [number, runs[number].name])} onChange=${(value) => goTo("overview", { runs: chosen.join("|"), run: value })} /></span>`}</div>`;
}

function RunHeader({ run }) {
  const { data, error } = useData("overview", { run });
  const { runs } = useContext(Live);
  if (error) return html`<p class="error">${error}</p>`;
  if (!data) return html`<p class="empty">Loading …</p>`;
  const live = !runs[run]?.ended, state = runs[run]?.state;
  return html`<header class="run-header"><h1><${SafeText} text=${data.name} /></h1>
      ${state && html`<span class=${`status ${live ? "live" : state === "finished" ? "done" : "stopped"}`}>${live ? "live" : state === "running" ? "unfinished" : state}</span>`}
      <span class="muted">step ${data.step ?? 0}${data.total_steps ? ` of ${data.total_steps}` : ""} · <a href=${linkTo("rollouts", { run })}>${data.rollouts.toLocaleString("en-US")} rollouts</a></span></header>
    ${data.updated === false && html`<p class="error">No trained weight has changed in this run.</p>`}
    ${data.diagnosis.length > 0 && html`<section class="findings" aria-label="Diagnosis">${data.diagnosis.map((finding) => html`<${FindingCard} finding=${finding} run=${run} />`)}</section>`}
    <section class="headline">${data.headline.map((change) => html`<div class="card figure"><span class="muted">${change.name}</span>
      <strong data-metric=${change.name}>${formatMetric(change.name, change.after ?? change.before)}</strong>
      ${change.after !== null && change.before !== null && html`<span class=${change.tone}>${change.after === change.before ? "unchanged" : change.name === "correct" ? `${formatSigned(100 * (change.after - change.before), 1)} points` : formatSigned(change.after - change.before, change.name === "tokens" ? 0 : 3)} from ${formatMetric(change.name, change.before)}</span>`}</div>`)}</section>
    ${data.facts.length > 0 && html`<p class="facts muted">${data.facts.join(" · ")}</p>`}`;
}

function FindingCard({ finding, run }) {
  const evidence = finding.evidence ?? {}, steps = evidence.steps?.length ? evidence.steps : finding.step ? [finding.step, finding.step] : [];
  const file = steps.length ? `step-${String(steps.at(-1)).padStart(6, "0")}` : "";
  const figures = Object.entries(evidence.figures ?? {}).filter(([, value]) => typeof value === "number");
  return html`<article class=${`finding ${finding.severity ?? ""}`}><h3>${visibleText(finding.kind)} <small class="muted">${finding.step ? `step ${finding.step}` : "before the first step"}</small></h3>
    <p><${SafeText} text=${String(finding.cause ?? "")} /></p><p class="cure"><${SafeText} text=${String(finding.cure ?? "")} /></p>
    ${finding.settings?.length > 0 && html`<p class="muted">try ${finding.settings.map((name) => html`<code>${String(name)}</code> `)}</p>`}
    ${figures.length > 0 && html`<p class="muted">${figures.map(([name, value]) => `${name} ${formatNumber(value)}`).join(", ")}</p>`}
    <p>${(evidence.rollouts ?? []).slice(0, 8).map((id, index) => html`<a href=${linkTo("rollout", { run, file, id })}>rollout ${index + 1}</a> `)}
      ${steps.length > 0 && html`<a href=${linkTo("rollouts", { run, phase: "train", step_min: steps[0], step_max: steps.at(-1) })}>${steps[0] === steps.at(-1) ? `all of step ${steps[0]}` : `all of steps ${steps[0]} to ${steps.at(-1)}`}</a>`}</p></article>`;
}

function Curves({ chosen, lead, params }) {
  const { runs } = useContext(Live);
  const asked = chosen.map((run) => useData("overview", { run }));
  const overviews = asked.map(({ data }) => data);
  const names = [...new Set(overviews.flatMap((data) => data?.metric_names ?? []))];
  const lambdas = names.filter((name) => /\/lambda$/.test(name));
  const budgets = names.filter((name) => /^(router|thinking)\/[^/]+\/budget$/.test(name)), ownBudgets = budgets.filter((name) => name !== "router/cost/budget");
  const times = names.filter((name) => name.startsWith("time/"));
  const extra = [...lambdas, ...times, ...budgets, ...ownBudgets.map(meanOf)];
  const picked = (params.metric || "").split("|").filter(Boolean);
  const wanted = [...new Set([...Object.values(CURVES).flat(), ...extra, ...picked])].filter((name) => names.includes(name));
  const read = chosen.map((run) => useData("series", wanted.length ? { run, names: wanted.join("|") } : null));
  const found = read.map(({ data }) => data);
  useContext(Theme);
  // All charts come at once: one that came later would move the others.
  if (![...asked, ...(wanted.length ? read : [])].every(({ data, error }) => data || error)) return html`<p class="empty">Loading …</p>`;
  if (!names.length) return html`<p class="empty">No metrics yet.</p>`;
  const many = chosen.length > 1;
  const line = (name, options = {}) => chosen.flatMap((run, index) => {
    const series = found[index]?.[name];
    return series ? [{ label: many ? `${runs[run].name}${options.suffix || ""}` : options.label || name, ...series, colour: many ? runColour(Number(run)) : options.colour || colour("accent"), dash: options.dash, points: options.points }] : [];
  });
  // Several metrics on one chart: of one run they differ by colour; runs differ by colour, their metrics by dash.
  const family = (labels) => Object.entries(labels).flatMap(([name, label], index) => line(name, { label, suffix: ` ${label}`, colour: runColour(index), dash: many ? DASHES[index % DASHES.length] : undefined }));
  const band = (column) => chosen.flatMap((run, index) => {
    const spread = overviews[index]?.spreads, prefix = many ? `${runs[run].name} ` : "";
    if (!spread?.steps.length) return [];
    const base = many ? runColour(Number(run)) : colour("accent"), mark = `${run}-${column}`;
    const hidden = { colour: "transparent", width: 0, unnamed: many };
    return [{ label: `${prefix}90 %`, steps: spread.steps, values: spread[column].high, ...hidden, high: mark, bandFill: `${base}2e` }, { label: `${prefix}10 %`, steps: spread.steps, values: spread[column].low, ...hidden, low: mark }];
  });
  const held = { label: "held-out", suffix: " held-out", colour: colour("good"), dash: [5, 4], points: true };
  const budgetLine = (name) => line(name, { label: "budget", suffix: " budget", colour: colour("bad"), dash: [2, 3], points: false });
  return html`<section class="grid charts">
    <${Chart} title="Score" note="Band: 10th to 90th percentile of the step's rollouts." lines=${[...band("score"), ...line("score/mean", { label: "training mean" }), ...line("eval/score", held)]} />
    <${Chart} title="Correct" lines=${[...line("reward/correct/mean", { label: "training" }), ...line("eval/correct", held)]} />
    <${Chart} title="Cost" zero note=${budgets.includes("router/cost/budget") ? "Dotted: the budget." : ""} lines=${[...band("cost"), ...line("cost/mean", { label: "training mean" }), ...line("eval/cost", held), ...budgetLine("router/cost/budget")]} />
    ${ownBudgets.map((name) => html`<${Chart} key=${name} title=${`Spending: ${unitOf(name)}`} unit="mean" zero note="Dotted: the budget." lines=${[...line(meanOf(name), { label: "mean" }), ...budgetLine(name)]} />`)}
    <${Chart} title="λ, the price of the budget" zero lines=${family(Object.fromEntries(lambdas.map((name) => [name, unitOf(name)])))} />
    <${Chart} title="Loss" lines=${[...line("loss"), ...line("eval/loss", held)]} />
    <${Chart} title="Sampled tokens" unit="a rollout" zero lines=${[...band("tokens"), ...chosen.flatMap((run, index) => overviews[index]?.spreads.steps.length ? [{ label: many ? runs[run].name : "mean", steps: overviews[index].spreads.steps, values: overviews[index].spreads.tokens.mean, colour: many ? runColour(Number(run)) : colour("accent") }] : [])]} />
    <${Chart} title="Speed" unit="tokens/s" zero lines=${line("time/tokens_per_s", { label: "tokens/s" })} />
    <${PhaseChart} series=${found[chosen.indexOf(lead)]} times=${times} name=${many ? runs[lead].name : ""} />
    <${Chart} title="Entropy" unit="nats" zero lines=${line("actor/entropy", { label: "entropy" })} />
    <${Chart} title="Drift" note="The gap is the largest between engine and learner." lines=${family({ "actor/kl": "KL of the update", "kl/reference": "KL to the reference", "canary/logprob_gap_max": "log-prob gap" })} />
    <${Chart} title="Groups without signal, clipped tokens" unit="share" zero lines=${family({ frac_zero_std: "equal scores", "actor/clip_frac": "clipped" })} />
    ${picked.map((name) => html`<${Chart} key=${name} title=${name} lines=${line(name)} />`)}
  </section>
  <${MetricPicker} names=${names} picked=${picked} params=${params} />
  <div class="grid two"><${KindTable} data=${overviews[chosen.indexOf(lead)]} run=${lead} /><${StopTable} data=${overviews[chosen.indexOf(lead)]} run=${lead} /><${TimeTable} series=${found[chosen.indexOf(lead)]} times=${times} /></div>`;
}

const timeLabel = (name) => name.replace("time/", "").replace(/_s$/, "").replaceAll("_", " ");

// The phases of a step on top of each other, and whatever else was timed as lines: it lies within them, or between steps.
function PhaseChart({ series, times, name }) {
  if (!series) return null;
  const title = `Time by phase${name ? `, ${name}` : ""}`;
  const rollout = series["time/rollout_s"], update = series["time/update_s"];
  const stacked = Boolean(rollout && update);
  const shown = new Set(["time/tokens_per_s", ...(stacked ? ["time/rollout_s", "time/update_s", "time/step_s", ...THINKING_TIMES] : [])]);
  const others = times.filter((one) => one.endsWith("_s") && !shown.has(one) && series[one]?.values.some((value) => value > 0));
  const lines = others.map((one, index) => ({ label: timeLabel(one), ...series[one], colour: runColour(3 + index), dash: stacked ? DASHES[1 + (index % 3)] : undefined, points: series[one].steps.length < 2 }));
  if (!stacked) return html`<${Chart} title=${title} unit="s a step" zero lines=${lines} />`;
  const plus = (...names) => {
    const columns = names.filter((one) => series[one]).map((one) => new Map(series[one].steps.map((step, index) => [step, series[one].values[index]])));
    return { steps: update.steps, values: update.steps.map((step) => columns.reduce((sum, column) => sum + (column.get(step) ?? 0), 0)) };
  };
  const thinking = THINKING_TIMES.some((one) => series[one]);
  return html`<${Chart} title=${title} unit="s a step" zero note=${`Areas are stacked.${lines.length ? " Dashed: within these phases, or between steps." : ""}`} lines=${[
    { label: `rollouts${thinking ? " + thinking" : ""} + update`, ...plus("time/rollout_s", "time/update_s"), colour: colour("run-1"), fill: `${colour("run-1")}33` },
    ...(thinking ? [{ label: "rollouts + thinking", ...plus("time/rollout_s", ...THINKING_TIMES), colour: colour("run-2"), fill: `${colour("run-2")}44` }] : []),
    { label: "rollouts", ...rollout, colour: colour("run-0"), fill: `${colour("run-0")}55` }, ...lines]} />`;
}

function TimeTable({ series, times }) {
  const rows = times.filter((name) => series?.[name]?.values.length && name !== "time/tokens_per_s");
  if (!rows.length) return null;
  const total = (name) => series[name]?.values.reduce((a, b) => a + b, 0);
  const whole = total("time/step_s");
  return html`<section class="card"><h2>Time of a step</h2><table class="figures"><thead><tr><th></th><th class="number">mean</th><th class="number">latest</th><th class="number">of the step</th></tr></thead><tbody>
    ${rows.map((name) => html`<tr data-time=${name}><td title=${name}>${timeLabel(name)}</td>${[total(name) / series[name].values.length, series[name].values.at(-1)].map((value) => html`<td class="number">${formatNumber(value)}${name.endsWith("_s") ? " s" : ""}</td>`)}
      <td class="number">${whole && name.endsWith("_s") ? `${(100 * total(name) / whole).toFixed(1)} %` : ""}</td></tr>`)}</tbody></table>
    <p class="note">Phases overlap: the router works within rollouts and update.</p></section>`;
}

function MetricPicker({ names, picked, params }) {
  const add = (event) => {
    if (names.includes(event.target.value)) {
      goTo("overview", { ...params, metric: [...new Set([...picked, event.target.value])].join("|") });
      event.target.value = "";
    }
  };
  return html`<p class="picker"><label>Add a chart <input list="metric-names" placeholder="name of a metric" onChange=${add} /></label>
    <datalist id="metric-names">${names.map((name) => html`<option value=${name} />`)}</datalist>
    ${picked.map((name) => html`<button class="chip on" onClick=${() => goTo("overview", { ...params, metric: picked.filter((one) => one !== name).join("|") })}>${name} ×</button>`)}</p>`;
}

function KindTable({ data, run }) {
  if (!data?.kinds.some((row) => row.changes.some((change) => change.after !== null || change.before !== null))) return null;
  return html`<section class="card"><h2>Before and after</h2><div class="scroll"><table class="figures"><thead><tr><th>tasks</th><th>n</th>${data.kinds[0].changes.map((change) => html`<th>${change.name}</th><th></th>`)}</tr></thead>
    <tbody>${data.kinds.map((row, index) => html`<tr><td>${index ? html`<a href=${linkTo("rollouts", { run, kind: row.label, phase: "eval" })}>${row.label}</a>` : row.label}</td><td class="number">${row.n ?? "–"}</td>
      ${row.changes.map((change) => html`<td class="number">${formatMetric(change.name, change.before)} → <b class=${change.tone}>${formatMetric(change.name, change.after)}</b></td><td>${change.name === "correct" && html`<${BeforeAfter} change=${change} />`}</td>`)}</tr>`)}</tbody></table></div></section>`;
}

function BeforeAfter({ change }) {
  return html`<span class="bar" aria-hidden="true"><i class="after" style=${{ width: `${100 * (change.after ?? 0)}%` }}></i><i class="before" style=${{ left: `${100 * (change.before ?? 0)}%` }}></i></span>`;
}

function StopTable({ data, run }) {
  const reasons = useMemo(() => Object.entries(data?.stops.reasons ?? {}).map(([reason, counts]) => [reason, counts.reduce((a, b) => a + b, 0), counts]), [data]);
  const faults = Object.entries(data?.faults ?? {}).filter(([name, value]) => typeof value === "number" && value && !["rollouts", "calls"].includes(name));
  if (!reasons.length && !faults.length) return null;
  const total = reasons.reduce((sum, [, count]) => sum + count, 0);
  return html`<section class="card"><h2>How rollouts ended</h2><table class="figures"><tbody>${reasons.map(([reason, count, counts]) => html`<tr data-reason=${reason}>
      <td><a href=${linkTo("rollouts", { run, stop_reason: reason, phase: "train" })}>${reason || "unknown"}</a></td><td class="number">${count.toLocaleString("en-US")}</td><td class="number">${(100 * count / total).toFixed(1)} %</td>
      <td><${Sparkline} values=${counts} /></td></tr>`)}</tbody></table>
    ${faults.length > 0 && html`<h3>Faults</h3><table class="figures"><tbody>${faults.map(([name, value]) => html`<tr data-fault=${name}><td>${name}</td><td class="number">${formatNumber(value)}</td></tr>`)}</tbody></table>`}
    <p class="note"><a href=${linkTo("rollouts", { run, fault: "true" })}>rollouts with a fault</a></p></section>`;
}

function Sparkline({ values }) {
  const high = Math.max(...values, 1), step = values.length > 1 ? 96 / (values.length - 1) : 0;
  const points = values.map((value, index) => `${(2 + index * step).toFixed(1)},${(18 - 16 * value / high).toFixed(1)}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 100 20" aria-hidden="true"><polyline points=${points} /></svg>`;
}
