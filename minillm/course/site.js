// Paper is white: a page that is read in dark mode prints as it looks in light mode.
{
  const page = document.documentElement;
  let theme = page.dataset.theme;
  window.addEventListener("beforeprint", () => { theme = page.dataset.theme; page.dataset.theme = "light"; });
  window.addEventListener("afterprint", () => { page.dataset.theme = theme; });
}
