// Dark or light, before the first paint; a classic script, because modules run after it.
"use strict";
{
  const KEY = "outrider.theme";
  const THEMES = ["system", "dark", "light"];
  let theme = "system";
  try {
    theme = localStorage.getItem(KEY) ?? theme;
  } catch {
    // Storage is forbidden: the system's theme then.
  }

  const apply = () => {
    if (!THEMES.includes(theme)) theme = "system";
    document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  };

  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      apply();
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // It lasts as long as the page.
      }
    });
  });
}
