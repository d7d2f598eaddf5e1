// The thinking levels of each step that was compared, side by side.
import { html } from "./lib.js";
import { useData } from "./api.js";
import { formatNumber, formatSigned, SafeText } from "./format.js";
import { linkTo } from "./route.js";
import { RolloutTabs } from "./rollout.js";
import { stepOfMessages } from "./conversation.js";
import { plainText } from "./text.js";

const LEVELS = [1, 2, 3, 4];

export function ThinkingPage({ params }) {
  const run = params.run ?? "0";
  const where = { run, file: params.file ?? "", id: params.id ?? "" };
  const { data, error, fits } = useData("rollout", where);
  if (error) return html`<p class="error">${error}</p>`;
  if (!data || !fits) return html`<p class="empty">Loading …</p>`;
  const messages = new Map([...stepOfMessages(data.messages, data.steps)].map(([index, step]) => [step, data.messages[index]]));
  return html`<nav class="crumbs"><a href=${linkTo("rollouts", { run })}>Rollouts</a> › <a href=${linkTo("rollout", where)}><${SafeText} text=${data.row.rollout_id} /></a></nav>
    <h1 class="question" dir="auto"><${SafeText} text=${data.row.question} /></h1><nav class="tabs" aria-label="Views of this rollout"><${RolloutTabs} page="thinking" run=${run} row=${data.row} /></nav>
    ${data.thinking.length === 0 && html`<p class="empty">No thinking levels were compared in this rollout: that is done in training steps, with <code>algorithm.rlvcr</code>, of the steps that it selects.</p>`}
    ${data.thinking.map((step) => html`<section><h2>Step ${step.step}: level ${step.level} was used</h2><div class="levels">${LEVELS.map((number) => {
      const level = step.levels.find((one) => one.level === number);
      return level ? html`<${LevelCard} level=${level} used=${number === step.level} message=${messages.get(step.step)} />` : html`<${MissingLevel} number=${number} />`;
    })}</div></section>`)}`;
}

function MissingLevel({ number }) {
  return html`<article class="card level" data-missing=${number}><h3>Level ${number}</h3><p class="muted">Left out: what was written at this level could not be used. The metrics <code>thinking/failed/…</code> count why.</p></article>`;
}

function usedThought(message) {
  const text = plainText(message?.thought) || plainText(message?.text);
  return /<think>([\s\S]*?)<\/think>/.exec(text)?.[1] ?? text;
}

function LevelCard({ level, used, message }) {
  const thought = level.tokens === 0 ? "" : used ? usedThought(message) : level.thought;
  return html`<article class=${`card level ${used ? "used" : ""}`} data-level=${level.level}><h3>Level ${level.level} ${used && html`<span class="pill">used</span>`}</h3>
    <div class="text thought-text" dir="auto">${thought ? html`<${SafeText} text=${String(thought)} />` : html`<span class="muted">no thought</span>`}</div>
    <table class="figures"><tbody><tr><td>thinking tokens</td><td class="number" data-value="tokens">${level.tokens}</td></tr><tr><td title="mean log-prob of the action after this thought">score (log-prob)</td><td class="number" data-value="score" title=${level.action_logprob}>${formatNumber(level.action_logprob)}</td></tr><tr><td title="mean entropy of the action after this thought">entropy</td><td class="number">${formatNumber(level.action_entropy)}</td></tr>
      <tr><td>advantage</td><td data-value="advantage" title=${level.advantage} class=${`number ${level.advantage > 0 ? "good" : level.advantage < 0 ? "bad" : ""}`}>${formatSigned(level.advantage)}</td></tr></tbody></table></article>`;
}
