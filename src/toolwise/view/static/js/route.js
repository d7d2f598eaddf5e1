// Every state of the pages is in the address: #/page?name=value. A link to it shows the same again.
import { useState, useLayoutEffect } from "./lib.js";

export function parseRoute(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  return { page: path || "overview", params: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function linkTo(page, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

// Pages hear of it before the next key: the browser's own event comes later.
export function goTo(page, params, replace = false) {
  const target = linkTo(page, params);
  if (replace) history.replaceState(null, "", target);
  else if (target !== location.hash) history.pushState(null, "", target);
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

export function useRoute() {
  const [route, setRoute] = useState(parseRoute(location.hash));
  useLayoutEffect(() => {
    const changed = () => setRoute(parseRoute(location.hash));
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return route;
}
