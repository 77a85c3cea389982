// Files for the user: made here, or fetched from the server first.

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// Fetch and download; gives what to tell the user: nothing, or why there is no file.
export async function save(url, name) {
  try {
    const answer = await fetch(url);
    if (!answer.ok) return `⚠ ${await refusal(answer)}`;
    download(await answer.blob(), name);
    return "";
  } catch (error) {
    return `⚠ The server cannot be reached (${error.message}).`;
  }
}

// The words of a refusal by the server.
export async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered ${answer.status}.`;
  }
}
