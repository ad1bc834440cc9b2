//! What the build needs from the system, and the error that names all that is missing of it.

/// What MLX's own CMakeLists.txt demands.
pub const CMAKE: (u32, u32) = (3, 25);

/// Something the build needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// CMake, new enough.
    CMake,
    /// ninja or make.
    BuildTool,
    /// A compiler that takes C++20.
    Cxx,
    /// libclang, which bindgen loads.
    Libclang,
    /// OpenBLAS with LAPACK and their C headers (Linux).
    Blas,
    /// nlohmann's JSON header.
    Json,
    /// The fmt headers.
    Fmt,
    /// Xcode's Metal compiler (macOS).
    Metal,
}

impl Need {
    /// What it is, the Debian packages and the brew formulae that bring it.
    fn describe(self) -> (String, &'static str, &'static str) {
        match self {
            Self::CMake => (
                format!("cmake {}.{} or newer", CMAKE.0, CMAKE.1),
                "cmake",
                "cmake",
            ),
            Self::BuildTool => ("ninja or make".into(), "ninja-build", "ninja"),
            Self::Cxx => ("a C++20 compiler".into(), "g++", "llvm"),
            Self::Libclang => ("libclang".into(), "libclang-dev", "llvm"),
            Self::Blas => (
                "OpenBLAS with cblas.h and lapacke.h".into(),
                "libopenblas-dev liblapacke-dev",
                "",
            ),
            Self::Json => (
                "nlohmann/json.hpp".into(),
                "nlohmann-json3-dev",
                "nlohmann-json",
            ),
            Self::Fmt => ("fmt/format.h".into(), "libfmt-dev", "fmt"),
            Self::Metal => (
                "the Metal compiler (Xcode; xcodebuild -downloadComponent MetalToolchain)".into(),
                "",
                "",
            ),
        }
    }
}

/// The error for `missing`: what it is and the commands that install it.
pub fn report(missing: &[Need]) -> String {
    let mut names = Vec::new();
    let (mut apt, mut brew) = (Vec::new(), Vec::new());
    for need in missing {
        let (name, deb, formula) = need.describe();
        names.push(name);
        apt.push(deb);
        brew.push(formula);
    }
    let join = |mut packages: Vec<&str>| {
        packages.retain(|p| !p.is_empty());
        packages.dedup();
        packages.join(" ")
    };
    let mut text = format!("not found, needed to build MLX: {}", names.join(", "));
    for (system, command, packages) in [
        ("Debian, Ubuntu", "sudo apt-get install", join(apt)),
        ("macOS", "brew install", join(brew)),
    ] {
        if !packages.is_empty() {
            text.push_str(&format!("\n{system}: {command} {packages}"));
        }
    }
    text
}

/// The version in the output of `cmake --version`.
pub fn parse_cmake_version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_whitespace().nth(2)?.split('.');
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
