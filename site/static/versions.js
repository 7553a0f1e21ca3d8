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
  menu.addEventListener("change", () => { location.href = new URL(`../${menu.value}/index.html`, here); });
  brand.after(menu);
});
