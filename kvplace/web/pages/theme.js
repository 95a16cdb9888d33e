// Before the first paint: light or dark as chosen earlier. Without a choice the style sheet follows the system.
(() => {
  const chosen = localStorage.getItem("kvplace-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
