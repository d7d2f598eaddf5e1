// The frame of all pages: navigation, theme, keyboard, and a look for new steps every two seconds.
import { html, render, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useState } from "./lib.js";
import { Live, fetchData } from "./api.js";
import { Theme } from "./charts.js";
import { ComparePage } from "./compare.js";
import { Choice } from "./format.js";
import { AnchorsPage, GroupPage } from "./group.js";
import { OverviewPage } from "./overview.js";
import { RolloutPage } from "./rollout.js";
import { RolloutsPage, focusSearch } from "./rollouts.js";
import { goTo, linkTo, useRoute } from "./route.js";
import { RouterPage } from "./router.js";
import { ThinkingPage } from "./thinking.js";

const PAGES = { overview: OverviewPage, rollouts: RolloutsPage, rollout: RolloutPage, group: GroupPage, anchors: AnchorsPage, router: RouterPage, thinking: ThinkingPage, compare: ComparePage };
const MENU = [["overview", "Overview", "o"], ["rollouts", "Rollouts", "r"], ["compare", "Compare", "c"]];
const THEMES = ["auto", "light", "dark"];
const POLL_MS = 2000;

function storedTheme() {
  try { return localStorage.getItem("theme") || "auto"; } catch { return "auto"; }
}

function useTheme() {
  const [wanted, setWanted] = useState(storedTheme());
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(system.matches);
  useEffect(() => {
    const changed = () => setDark(system.matches);
    system.addEventListener("change", changed);
    return () => system.removeEventListener("change", changed);
  }, []);
  const theme = wanted === "auto" ? (dark ? "dark" : "light") : wanted;
  document.documentElement.dataset.theme = theme;
  const next = () => {
    const chosen = THEMES[(THEMES.indexOf(wanted) + 1) % 3];
    try { localStorage.setItem("theme", chosen); } catch { /* not kept */ }
    setWanted(chosen);
  };
  return [theme, wanted, next];
}

function useRuns() {
  const [state, setState] = useState({ runs: null, error: null });
  useEffect(() => {
    let timer = null, stopped = false;
    const look = async () => {
      let wait = POLL_MS;
      try {
        const runs = await fetchData("runs");
        if (runs.every((run) => run.ended)) wait = 5 * POLL_MS;
        setState((old) => (JSON.stringify(old.runs) === JSON.stringify(runs) && !old.error ? old : { runs, error: null }));
      } catch (error) {
        const silent = error instanceof TypeError; // nothing came back
        setState((old) => ({ ...old, error: silent ? "The server does not answer. Is toolwise view still running?" : error.message }));
      }
      if (!stopped && !window.TOOLWISE_BUNDLE) timer = setTimeout(look, document.hidden ? 5 * wait : wait);
    };
    look();
    return () => { stopped = true; clearTimeout(timer); };
  }, []);
  return state;
}

function App() {
  const { page, params } = useRoute();
  const { runs, error } = useRuns();
  const [theme, wanted, nextTheme] = useTheme();
  const [help, setHelp] = useState(false);
  useLayoutEffect(() => {
    const pressed = (event) => {
      if (event.key === "Escape") { setHelp(false); document.activeElement?.blur(); }
      if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      const entry = MENU.find(([, , key]) => key === event.key);
      if (entry) goTo(entry[0], { run: params.run });
      else if (event.key === "?") setHelp((shown) => !shown);
      else if (event.key === "t") nextTheme();
      else if (event.key === "u" && page !== "overview") history.back();
      else if (event.key === "/") {
        event.preventDefault();
        if (page !== "rollouts") goTo("rollouts", { run: params.run });
        focusSearch();
      }
    };
    window.addEventListener("keydown", pressed);
    return () => window.removeEventListener("keydown", pressed);
  });
  useEffect(() => { window.scrollTo(0, 0); }, [page, params.id, params.group]);
  const live = useMemo(() => ({ runs: runs ?? [] }), [runs]);
  const Page = Object.hasOwn(PAGES, page) && PAGES[page];
  const run = runs?.[params.run ?? 0];
  useEffect(() => { document.title = `${page}${run ? ` · ${run.name}` : ""} · Toolwise`; }, [page, run?.name]);
  return html`<${Live.Provider} value=${live}><${Theme.Provider} value=${theme}>
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>to the content</a>
    <nav class="bar-top" aria-label="Pages"><a class="brand" href=${linkTo("overview")}>Toolwise</a>
      ${MENU.map(([name, label, key]) => html`<a class=${page === name || (name === "rollouts" && ["rollout", "group", "anchors", "router", "thinking"].includes(page)) ? "on" : ""} href=${linkTo(name, { run: name === "overview" ? "" : params.run })} title=${`key ${key}`}>${label}</a>`)}
      <span class="space"></span>
      ${runs?.length > 1 && page === "rollouts" && html`<${Choice} name="run" value=${params.run ?? "0"} options=${runs.map((one) => [one.run, one.name])} onChange=${(value) => goTo("rollouts", { run: value })} />`}
      ${run && !run.ended && !window.TOOLWISE_BUNDLE && html`<span class="status live" title="looks for new steps every two seconds">step ${run.step}</span>`}
      <button class="link" onClick=${nextTheme} title="theme (key t)" aria-label=${`theme: ${wanted}`}>${{ auto: "◐", light: "○", dark: "●" }[wanted]}</button><button class="link" onClick=${() => setHelp(true)} aria-label="keyboard help" title="keys (?)">?</button></nav>
    <main id="main" tabindex="-1">${error && html`<p class="error">${error}</p>`}
      ${runs ? (Page ? html`<${Guarded} key=${page} params=${params}><${Page} params=${params} /></${Guarded}>` : html`<p class="error">There is no page ${page}.</p>`) : !error && html`<p class="empty">Loading …</p>`}</main>
    ${help && html`<${Help} close=${() => setHelp(false)} />`}</${Theme.Provider}></${Live.Provider}>`;
}

// A page that cannot show its data says so; the others still work.
function Guarded({ params, children }) {
  const [error, reset] = useErrorBoundary();
  useEffect(reset, [JSON.stringify(params)]);
  return error ? html`<p class="error">This page cannot be shown: ${error.message}</p>` : children;
}

function Help({ close }) {
  const keys = [["o r c", "overview, rollouts, compare"], ["/", "search"], ["j k Enter", "in the table: next, previous, open"], ["n p", "in the table: next and previous page"], ["← → Enter", "in a scatter plot: point before, after, open"], ["1 … 7", "in a rollout: colour tokens by"], ["← →", "in a rollout: token before, after"], ["[ ]", "in a rollout: sibling before, after"], ["u", "back"], ["t", "theme"], ["?", "this list"]];
  return html`<div class="overlay" onClick=${close}><section class="card help" role="dialog" aria-label="Keys" onClick=${(event) => event.stopPropagation()}><h2>Keys</h2><table class="figures"><tbody>${keys.map(([key, what]) => html`<tr><td><kbd>${key}</kbd></td><td>${what}</td></tr>`)}</tbody></table><button onClick=${close}>close</button></section></div>`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
