// Opened as a file the page may load no module: it says what to do. (So this is a plain script.)
"use strict";
if (location.protocol === "file:") {
  $("banner").className = "problem";
  $("banner").textContent = "Opened as a file, this page cannot load the model: it needs a server. In the folder of this file write “python -m http.server”, and open localhost:8000.";
}
