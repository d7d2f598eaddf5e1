// Every state of the pages is in the address: #/page?name=value. A link to it shows the same again.
import { useState, useEffect } from "./lib.js";

export function parseRoute(hash) {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  return { page: path || "overview", params: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function linkTo(page, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

export function goTo(page, params, replace = false) {
  const target = linkTo(page, params);
  if (replace) {
    history.replaceState(null, "", target);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = target;
  }
}

export function useRoute() {
  const [route, setRoute] = useState(parseRoute(location.hash));
  useEffect(() => {
    const changed = () => setRoute(parseRoute(location.hash));
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return route;
}
