// A menu of the versions beside this one. Without other versions there is nothing to choose, and no menu.
document.addEventListener("DOMContentLoaded", () => {
  const versions = window.LEASEHOLD_VERSIONS || [];
  const brand = document.querySelector(".sidebar-brand");
  if (!brand || versions.length < 2) return;
  const here = new URL(document.documentElement.dataset.content_root || "./", location.href);
  const current = here.pathname.replace(/\/$/, "").split("/").pop();
  const menu = document.createElement("select");
  menu.className = "versions";
  menu.setAttribute("aria-label", "Version");
  for (const version of versions) menu.add(new Option(version, version, false, version === current));
  menu.addEventListener("change", async () => {
    const chosen = new URL(`../${menu.value}/`, here);
    const samePage = new URL(location.pathname.slice(here.pathname.length), chosen);
    // From disk, a page cannot ask whether another exists.
    const exists = location.protocol.startsWith("http") && await fetch(samePage, { method: "HEAD" }).then((answer) => answer.ok, () => false);
    location.href = exists ? samePage : new URL("index.html", chosen);
  });
  brand.after(menu);
});
