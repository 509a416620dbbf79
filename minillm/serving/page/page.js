// The page: colours, models, and the two halves, chat and engine room. Built in chapter 23.

import { askForKey, send } from "./api.js";
import { startChat } from "./chat.js";
import { $, make } from "./dom.js";
import { startLoad } from "./load.js";
import { startRoom } from "./room.js";

function chooseColours() {
  const theme = $("theme");
  const apply = () => {
    document.documentElement.style.colorScheme = theme.value || "light dark";
    document.dispatchEvent(new Event("colours"));
  };
  theme.value = localStorage.getItem("minillm-theme") ?? "";
  theme.addEventListener("change", () => {
    localStorage.setItem("minillm-theme", theme.value);
    apply();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

// The models that the server has now, adapters under the model that they belong to.
async function listModels() {
  const { data } = await (await send("/v1/models")).json();
  const bases = data.filter((one) => !one.parent), adapters = data.filter((one) => one.parent);
  const option = (one) => make("option", { value: one.id, textContent: one.id });
  for (const select of [$("model"), $("model-2")]) {
    const chosen = select.value;
    select.replaceChildren(...bases.map(option));
    if (adapters.length) select.append(make("optgroup", { label: "Adapters" }, ...adapters.map(option)));
    if (data.some((one) => one.id === chosen)) select.value = chosen;
  }
  const base = bases[0] ?? data[0];
  const name = bases.length > 1 ? `${bases.length} models` : base && `${base.id} · up to ${base.max_model_len.toLocaleString("en")} tokens`;
  $("model-name").textContent = name ?? "";
  $("model").onchange = bases.length > 1 ? () => document.dispatchEvent(new Event("model")) : null;
}

chooseColours();
$("key-button").addEventListener("click", () => askForKey("This key is sent with every request of this page."));
$("key-cancel").addEventListener("click", () => $("key-dialog").close("cancel"));
$("settings").addEventListener("toggle", () => $("settings").open && listModels().catch(() => {}));
document.addEventListener("opened", () => listModels().catch(() => {}));
startChat();
startLoad();
listModels()
  .catch((error) => ($("model-name").textContent = error.message))
  .finally(startRoom);
