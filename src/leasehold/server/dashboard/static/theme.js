// Before the first paint: the theme that the reader chose, if any.
"use strict";
try {
  const theme = localStorage.getItem("leasehold-theme");
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
} catch { /* storage is blocked: the system's theme it is */ }
