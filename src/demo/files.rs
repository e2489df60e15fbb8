//! The regular files under a folder.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, DirEntry, FileType};
use std::io;
use std::path::{Path, PathBuf};

/// What was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// In order of their paths.
    pub(crate) files: Vec<PathBuf>,
    /// Folders that could not be read, and why.
    pub(crate) unreadable: Vec<String>,
    /// There are more files than were asked for.
    pub(crate) more: bool,
}

/// Lists at most `max` regular files under `root`, folder by folder, each in order of its names.
///
/// Links are not followed. What is called `.git`, and folders that hold a `CACHEDIR.TAG`, are
/// skipped; so are the paths in `except`. A `root` that is a file is that file.
///
/// # Errors
/// When `root` is not there or cannot be read.
pub(crate) fn regular_files(
    root: &Path,
    max: usize,
    except: &BTreeSet<PathBuf>,
) -> io::Result<Found> {
    let metadata = fs::metadata(root)?;
    let mut found = Found::default();
    if metadata.is_file() {
        found.files.push(root.into());
        return Ok(found);
    }
    if !metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "neither a folder nor a file"));
    }
    // Names are shown without the `./` of the current folder.
    let base = if root == Path::new(".") { PathBuf::new() } else { root.into() };
    let mut folders = vec![(base, entries(root)?)];
    while let Some((folder, inside)) = folders.last_mut() {
        let Some((name, kind)) = inside.pop() else {
            folders.pop();
            continue;
        };
        // In a worktree `.git` is a file.
        if name == ".git" {
            continue;
        }
        let path = folder.join(&name);
        if kind.is_file() {
            if is_excepted(&path, except) {
                continue;
            }
            if found.files.len() == max {
                found.more = true;
                break;
            }
            found.files.push(path);
        } else if kind.is_dir() {
            match entries(&path) {
                Ok(inside) if inside.iter().any(|(name, _)| name == "CACHEDIR.TAG") => {}
                Ok(inside) => folders.push((path, inside)),
                Err(e) => found.unreadable.push(format!("{}: {e}", path.display())),
            }
        }
    }
    Ok(found)
}

/// A folder's entries, the last one first.
fn entries(folder: &Path) -> io::Result<Vec<(OsString, FileType)>> {
    let entry = |entry: io::Result<DirEntry>| {
        let entry = entry?;
        Ok((entry.file_name(), entry.file_type()?))
    };
    let mut entries = fs::read_dir(folder)?.map(entry).collect::<io::Result<Vec<_>>>()?;
    entries.sort_by(|(a, _), (b, _)| b.cmp(a));
    Ok(entries)
}

fn is_excepted(path: &Path, except: &BTreeSet<PathBuf>) -> bool {
    !except.is_empty() && std::path::absolute(path).is_ok_and(|path| except.contains(&path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn tree() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for folder in ["b/deep", ".git/objects", "target/debug", "empty"] {
            fs::create_dir_all(at(folder)).unwrap();
        }
        for file in
            ["a", "b/2", "b/10", "b/deep/x", "c", ".git/config", "target/CACHEDIR.TAG", "target/t"]
        {
            fs::write(at(file), file).unwrap();
        }
        fs::write(at("b/.git"), "gitdir: elsewhere").unwrap();
        symlink(at("a"), at("link")).unwrap();
        symlink(dir.path(), at("b/loop")).unwrap();
        dir
    }

    fn names(root: &Path, found: &Found) -> Vec<String> {
        let name = |p: &PathBuf| p.strip_prefix(root).unwrap().display().to_string();
        found.files.iter().map(name).collect()
    }

    #[test]
    fn regular_files_in_order_without_links_git_and_caches() {
        let dir = tree();
        let found = regular_files(dir.path(), 100, &BTreeSet::new()).unwrap();
        assert_eq!(names(dir.path(), &found), ["a", "b/10", "b/2", "b/deep/x", "c"]);
        assert_eq!((found.more, found.unreadable), (false, vec![]));
    }

    #[test]
    fn no_more_than_asked_for() {
        let dir = tree();
        let found = regular_files(dir.path(), 2, &BTreeSet::new()).unwrap();
        assert_eq!(
            (names(dir.path(), &found), found.more),
            (vec!["a".into(), "b/10".into()], true)
        );
        assert!(!regular_files(dir.path(), 5, &BTreeSet::new()).unwrap().more);
    }

    #[test]
    fn excepted_files_are_left_out() {
        let dir = tree();
        let except = BTreeSet::from([dir.path().join("c"), dir.path().join("b/2")]);
        let found = regular_files(dir.path(), 100, &except).unwrap();
        assert_eq!(names(dir.path(), &found), ["a", "b/10", "b/deep/x"]);
    }

    #[test]
    fn a_file_is_itself_and_nothing_is_an_error() {
        let dir = tree();
        let file = dir.path().join("b/2");
        let found = regular_files(&file, 100, &BTreeSet::new()).unwrap();
        assert_eq!(found.files, [file]);
        let gone = regular_files(&dir.path().join("gone"), 100, &BTreeSet::new());
        assert_eq!(gone.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(
            regular_files(&dir.path().join("empty"), 1, &BTreeSet::new()).unwrap().files.len(),
            0
        );
    }
}
