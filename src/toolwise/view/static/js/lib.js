// The vendored libraries, under the names that the modules use.

export const { html, render, useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback, useErrorBoundary, createContext, useContext } = window.htmPreact;
export const UPlot = window.uPlot;
