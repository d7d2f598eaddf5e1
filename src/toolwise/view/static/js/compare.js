// Two files of rollouts on the same tasks: what flipped, what got cheaper, and both conversations.
import { html, useContext } from "./lib.js";
import { Live, useData } from "./api.js";
import { Conversation } from "./conversation.js";
import { Choice, formatNumber, markOf, SafeText, stepName, visibleText } from "./format.js";
import { goTo, linkTo } from "./route.js";

const OUTCOMES = { lost: ["right → wrong", "bad"], learned: ["wrong → right", "good"], worse: ["score fell", "bad"], better: ["score rose", "good"], dearer: ["dearer", "bad"], cheaper: ["cheaper", "good"], same: ["same", ""] };

export function ComparePage({ params }) {
  const { runs } = useContext(Live);
  const first = params.run ?? "0", second = params.other_run ?? String(Math.min(1, runs.length - 1));
  const { data: left } = useData("facets", { run: first });
  const { data: right } = useData("facets", { run: second });
  const evals = (facets) => (facets?.files ?? []).filter((file) => file.phase === "eval");
  const file = params.file || evals(left)[0]?.file || left?.files[0]?.file, other = params.other_file || evals(right).at(-1)?.file || right?.files.at(-1)?.file;
  const { data, error, fits } = useData("compare", file && other ? { run: first, file, other_run: second, other_file: other } : null);
  const set = (changes) => goTo("compare", { run: first, file, other_run: second, other_file: other, outcome: params.outcome, task: "", left: "", right: "", ...changes }, true);
  const side = (label, run, facets, name, runName, current) => html`<fieldset><legend>${label}</legend>${runs.length > 1 && html`<${Choice} label="run" value=${run} options=${runs.map((one) => [one.run, one.name])} onChange=${(value) => set({ [runName]: value, [name]: "" })} />`}
    <${Choice} label="step" value=${current} options=${(facets?.files ?? []).map((one) => [one.file, `${one.phase === "eval" ? "validation at" : "training"} step ${one.step}`])} onChange=${(value) => set({ [name]: value })} /></fieldset>`;
  return html`<h1>Compare</h1><div class="filters">${side("first", first, left, "file", "run", file)} ${side("second", second, right, "other_file", "other_run", other)}</div>
    ${error && html`<p class="error">${error}</p>`}
    ${data && fits && html`<${Comparison} data=${data} params=${params} set=${set} sides=${{ first: { run: first, file }, second: { run: second, file: other } }} />`}`;
}

function Comparison({ data, params, set, sides }) {
  const shown = data.tasks.filter((task) => (params.outcome ? task.outcome === params.outcome : true));
  if (!data.tasks.length) return html`<p class="empty">No task is in both: ${data.only_first} only in the first, ${data.only_second} only in the second. Training steps draw other tasks; compare validations.</p>`;
  const chosen = shown.find((task) => task.task_id === params.task) ?? shown[0];
  return html`<div class="chips">${Object.entries(OUTCOMES).map(([name, [label, tone]]) => data.counts[name] > 0 && html`<button class=${`chip ${params.outcome === name ? "on" : ""}`} aria-pressed=${params.outcome === name} data-outcome=${name} onClick=${() => set({ outcome: params.outcome === name ? "" : name })}><b class=${tone}>${data.counts[name]}</b> ${label}</button>`)}</div>
    <div class="scroll card flush tasks"><table class="rollouts"><thead><tr><th>task</th><th class="wide">kind</th><th>outcome</th><th class="number">score</th><th class="number">cost</th></tr></thead><tbody>
      ${shown.map((task) => html`<tr class=${task === chosen ? "cursor" : ""} data-task=${task.task_id} data-result=${task.outcome} onClick=${() => set({ task: task.task_id })}><td class="question"><button class="link" onClick=${() => set({ task: task.task_id })}><${SafeText} text=${task.first.question} /></button></td><td class="wide word">${visibleText(task.first.kind)}</td><td class=${OUTCOMES[task.outcome][1]}>${OUTCOMES[task.outcome][0]}</td>
        <td class="number">${formatNumber(task.first.score)} → ${formatNumber(task.second.score)}</td><td class="number">${formatNumber(task.first.cost, 2)} → ${formatNumber(task.second.cost, 2)}</td></tr>`)}</tbody></table></div>
    ${chosen && html`<div class="grid two sides"><${ComparedTask} side=${sides.first} rollouts=${chosen.first.rollouts} chosen=${params.left} onChoose=${(left) => set({ task: chosen.task_id, left, right: params.right })} /><${ComparedTask} side=${sides.second} rollouts=${chosen.second.rollouts} chosen=${params.right} onChoose=${(right) => set({ task: chosen.task_id, left: params.left, right })} /></div>`}`;
}

// One of the rollouts of a task, and the others to choose from.
function ComparedTask({ side, rollouts, chosen, onChoose }) {
  const shown = rollouts.find((one) => one.rollout_id === chosen) ?? rollouts[0];
  return html`<div class="compared">${rollouts.length > 1 && html`<div class="chips" role="group" aria-label="Rollouts of this task">${rollouts.map((one) => html`<button class=${`chip ${one === shown ? "on" : ""}`} aria-pressed=${one === shown} data-choice=${one.rollout_id} onClick=${() => onChoose(one.rollout_id)}>${markOf(one.correct)} ${formatNumber(one.score)}</button>`)}</div>`}
    <${ComparedSide} where=${{ ...side, id: shown.rollout_id }} /></div>`;
}

function ComparedSide({ where }) {
  const { data, error, fits } = useData("rollout", where);
  if (error) return html`<p class="error">${error}</p>`;
  if (!data || !fits) return html`<p class="empty">Loading …</p>`;
  return html`<section><h2><a href=${linkTo("rollout", where)}>${stepName(where.file)}</a> ${markOf(data.row.correct)} <small class="muted">score ${formatNumber(data.row.score)}, cost ${formatNumber(data.row.cost, 2)}</small></h2><${Conversation} page=${data} where=${where} compact /></section>`;
}
