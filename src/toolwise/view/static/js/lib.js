// The vendored libraries, under the names that the modules use.
// Listeners to keys are layout effects: other effects run after the page is painted, when a key may have come already.

export const { html, render, useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback, useErrorBoundary, createContext, useContext } = window.htmPreact;
export const UPlot = window.uPlot;
