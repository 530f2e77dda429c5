/* Loaded before the first paint, so that a dark page does not flash white. */
(() => {
  const root = document.documentElement;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);

  const show = () => {
    for (const button of document.querySelectorAll("[data-action=theme]")) {
      button.setAttribute("aria-pressed", String(isDark()));
    }
  };

  const toggle = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    show();
    localStorage.setItem("theme", root.dataset.theme);
  };

  prefersDark.addEventListener("change", show);
  document.addEventListener("DOMContentLoaded", () => {
    document.querySelector("[data-action=theme]")?.addEventListener("click", toggle);
    show();
  });
  // Last, since it throws if storage is disabled.
  const kept = localStorage.getItem("theme");
  if (kept === "light" || kept === "dark") root.dataset.theme = kept;
})();
