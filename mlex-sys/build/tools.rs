//! Checks for what the build needs from the system, so that one error names all that is missing.

use crate::config::{Config, user_var};
use crate::needs::{CMAKE, Need, parse_cmake_version, report};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The C++ compiler, and what the system has for it.
pub struct Tools {
    compiler: PathBuf,
    /// The compiler's version text; empty when it does not run.
    pub compiler_version: String,
    macos: bool,
}

impl Tools {
    /// Finds the compiler as the `cc` crate does (`CXX` and its variants).
    pub fn find(config: &Config) -> Self {
        // Watched here; what they change reaches the keys through the compiler's version.
        for name in ["CXX", "HOST_CXX", "TARGET_CXX"] {
            user_var(name);
        }
        user_var(&format!("CXX_{}", config.target));
        user_var(&format!("CXX_{}", config.target.replace('-', "_")));
        let compiler = cc::Build::new()
            .cpp(true)
            .cargo_metadata(false)
            .cargo_warnings(false)
            .try_get_compiler()
            .map_or_else(|_| PathBuf::from("c++"), |tool| tool.path().to_path_buf());
        let compiler_version = output(Command::new(&compiler).arg("--version")).unwrap_or_default();
        Self {
            compiler,
            compiler_version,
            macos: config.macos(),
        }
    }

    /// The C++ compiler's path.
    pub fn compiler(&self) -> &Path {
        &self.compiler
    }

    /// Checks for everything that is about to be used: `mlx` for the build of MLX.
    pub fn check(&self, config: &Config, mlx: bool) -> Result<(), String> {
        let mut missing = Vec::new();
        let mut need = |what: Need, there: bool| {
            if !there {
                missing.push(what);
            }
        };
        let cxx = self.compiles("#include <concepts>\n#include <span>\nstatic_assert(true);");
        need(Need::Cxx, cxx);
        need(Need::Libclang, clang_sys::load().is_ok());
        if mlx {
            let cmake = output(Command::new("cmake").arg("--version"));
            need(
                Need::CMake,
                cmake.and_then(|text| parse_cmake_version(&text)) >= Some(CMAKE),
            );
            need(Need::BuildTool, ninja() || runs("make"));
            // Without a compiler to ask, look where headers usually are.
            let header = |name: &str| match cxx {
                true => self.compiles(&format!("#include <{name}>")),
                false => usual_header(config, name),
            };
            need(Need::Json, header("nlohmann/json.hpp"));
            need(Need::Fmt, header("fmt/format.h"));
            if self.macos {
                need(Need::Metal, !config.metal || metal_compiler());
            } else {
                let headers = header("cblas.h") && header("lapacke.h");
                need(Need::Blas, headers && (!cxx || self.openblas_links(config)));
            }
        }
        if missing.is_empty() {
            Ok(())
        } else {
            Err(report(&missing))
        }
    }

    /// The folder that holds `json.hpp`.
    pub fn json_folder(&self) -> Option<PathBuf> {
        let mut command = self.command("-M");
        let rule = with_input(&mut command, "#include <nlohmann/json.hpp>\n")?;
        rule.split_whitespace()
            .find(|word| word.ends_with("nlohmann/json.hpp"))
            .and_then(|file| Path::new(file).parent())
            .map(Path::to_path_buf)
    }

    fn compiles(&self, text: &str) -> bool {
        with_input(&mut self.command("-fsyntax-only"), text).is_some()
    }

    fn openblas_links(&self, config: &Config) -> bool {
        let probe = config.out_dir.join("blas-probe");
        let mut command = self.command("-o");
        command.arg(&probe).arg("-lopenblas");
        with_input(
            &mut command,
            "#include <cblas.h>\n#include <lapacke.h>\n\
             void *volatile used[] = {(void *)&cblas_ddot, (void *)&LAPACK_sgetrf};\n\
             int main() { return used[0] == used[1]; }\n",
        )
        .is_some()
    }

    /// The compiler, told to read C++20 from its input.
    fn command(&self, action: &str) -> Command {
        let mut command = Command::new(&self.compiler);
        command.args(["-std=gnu++20", "-x", "c++"]);
        if self.macos
            && let Some(prefix) = output(Command::new("brew").arg("--prefix"))
        {
            command.arg(format!("-I{}/include", prefix.trim()));
        }
        if action == "-o" {
            command.args(["-", "-o"]);
        } else {
            command.args([action, "-"]);
        }
        command
    }
}

/// Whether ninja is there; make does otherwise.
pub fn ninja() -> bool {
    runs("ninja")
}

fn usual_header(config: &Config, name: &str) -> bool {
    let multiarch = format!("/usr/include/{}-linux-gnu", config.target_arch);
    [
        "/usr/include",
        "/usr/local/include",
        "/opt/homebrew/include",
        &multiarch,
    ]
    .iter()
    .any(|folder| Path::new(folder).join(name).is_file())
}

fn metal_compiler() -> bool {
    output(Command::new("xcrun").args(["-sdk", "macosx", "metal", "--version"])).is_some()
}

fn runs(program: &str) -> bool {
    output(Command::new(program).arg("--version")).is_some()
}

/// What `command` prints, if it succeeds.
pub fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok()?;
    let success = output.status.success();
    success.then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn with_input(command: &mut Command, text: &str) -> Option<String> {
    use std::io::Write;
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    // A compiler that ends before it has read everything shows in its status.
    let _ = child.stdin.take()?.write_all(text.as_bytes());
    let output = child.wait_with_output().ok()?;
    let success = output.status.success();
    success.then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}
